// Package monitoring holds deployments/monitoring true: promtool checks the alerts and plays series
// against them, and a real Prometheus scrapes a daemon with simulated GPUs, where every panel of
// the dashboard and every alert must find data. make e2e-monitoring builds Prometheus' programs and
// runs the tests.
package monitoring
