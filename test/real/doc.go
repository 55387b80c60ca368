// Package real holds this program to NVIDIA's own parts, as Debian's archive has them: NVML of each
// branch, control daemons of MPS, and a whole driver root from which real containers are made. The
// script parts fetches them. `make real` runs it; without the parts its tests are left out.
package real
