package health

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Class is the meaning of an XID number alone for the GPU.
type Class int

// The classes of XIDs.
const (
	// Decode: the driver's recovery action decides, not the number.
	Decode Class = iota
	// Application: the GPU is good. The process must be restarted.
	Application
	// Informational: the GPU may get work as before.
	Informational
	// Transient: the GPU is good after a reset or a restart.
	Transient
	// Hardware: an operator must repair or replace a part.
	Hardware
)

func (c Class) String() string {
	names := [...]string{"decode", "application", "informational", "transient", "hardware"}
	if c < 0 || int(c) >= len(names) {
		return fmt.Sprintf("Class(%d)", int(c))
	}
	return names[c]
}

// An XID is a row of the catalog: the facts about one error number of the driver.
type XID struct {
	Code uint64
	// Name says what happened; empty for a code missing from the catalog.
	Name  string
	Class Class
	// Bucket is the first action recommended by NVIDIA's catalog; empty without a recommendation.
	Bucket string
	// CoveredFrom is the first driver branch whose recovery action covers this XID: the action NONE
	// then means that the XID needs no action. It is 0 for an XID covered by no recovery action.
	CoveredFrom int
}

// XIDs with special rules.
const (
	remappingFailed = 64 // a row could not be remapped; also in the readings since Ampere
	fellOffTheBus   = 79 // the GPU is unreachable
	gspTimeout      = 119
	gspError        = 120
)

// Lookup returns the catalog's row for a code, or a nameless row of class Decode if the code is
// missing.
func Lookup(code uint64) XID {
	i, ok := slices.BinarySearchFunc(catalog[:], code,
		func(x XID, code uint64) int { return cmp.Compare(x.Code, code) })
	if !ok {
		return XID{Code: code}
	}
	return catalog[i]
}

// String returns the XID for display: "XID 79 (GPU fell off the bus)".
func (x XID) String() string {
	if x.Name == "" {
		return fmt.Sprintf("XID %d", x.Code)
	}
	return fmt.Sprintf("XID %d (%s)", x.Code, x.Name)
}

// wholeGPU reports whether the remedy concerns the whole GPU, even after an XID of one MIG device.
func (x XID) wholeGPU() bool { return x.Class == Transient || x.Class == Hardware }

// remedy returns the remedy after the XID, unless a recovery action overrides it.
func (x XID) remedy() inventory.Remedy {
	switch {
	case x.Bucket == "RESTART_BM" || x.Bucket == "RESTART_VM":
		return inventory.RemedyReboot
	case x.Class == Hardware:
		return inventory.RemedyHardware
	}
	return inventory.RemedyReset
}

// catalog follows NVIDIA's "Analyzing Xid Errors with the Xid Catalog" of October 2025 for Ampere
// and newer, with our own names and classes. Codes listed by NVIDIA as unused have the bucket
// CONTACT_SUPPORT. The source of codes 173 to 176 is the open kernel driver. The source of code 185
// are the release notes of NVIDIA's "GPU Operational Events" R620, with the name SPARING_EVENT and
// no remedy. Recovery actions have covered 158 and 159 since these codes exist.
var catalog = [...]XID{
	{1, "command FIFO: illegal method", Decode, "CONTACT_SUPPORT", 0},
	{2, "command FIFO: method left to software", Decode, "CONTACT_SUPPORT", 0},
	{3, "command FIFO: unknown method", Decode, "CONTACT_SUPPORT", 0},
	{4, "command FIFO: channel busy", Decode, "CONTACT_SUPPORT", 0},
	{5, "command FIFO: overflow", Decode, "CONTACT_SUPPORT", 0},
	{6, "command FIFO: parse error", Decode, "CONTACT_SUPPORT", 0},
	{7, "command FIFO: page-table entry error", Decode, "CONTACT_SUPPORT", 0},
	{8, "engine idle timeout, channel stopped", Application, "RESTART_APP", 0},
	{9, "graphics engine: wrong instance", Decode, "CONTACT_SUPPORT", 0},
	{10, "graphics engine: single-step trap", Decode, "CONTACT_SUPPORT", 0},
	{11, "bad push buffer (missing hardware)", Application, "RESTART_APP", 0},
	{12, "graphics engine: method left to software", Decode, "CONTACT_SUPPORT", 0},
	{13, "graphics or SM exception", Application, "RESTART_APP", 0},
	{14, "simulated error (test)", Informational, "IGNORE", 0},
	{15, "display scan-line timeout", Decode, "CONTACT_SUPPORT", 0},
	{16, "vertical-blank callback timeout", Decode, "CONTACT_SUPPORT", 0},
	{17, "bad parameter", Decode, "CONTACT_SUPPORT", 0},
	{18, "bus-master timeout", Decode, "CONTACT_SUPPORT", 0},
	{19, "display notifier missed", Decode, "CONTACT_SUPPORT", 0},
	{20, "MPEG engine: method left to software", Decode, "CONTACT_SUPPORT", 0},
	{21, "motion-estimation engine: method left to software", Decode, "CONTACT_SUPPORT", 0},
	{22, "video processor: method left to software", Decode, "CONTACT_SUPPORT", 0},
	{23, "error logging switched on", Decode, "CONTACT_SUPPORT", 0},
	{24, "graphics semaphore timeout", Decode, "CONTACT_SUPPORT", 0},
	{25, "illegal push buffer", Application, "RESTART_APP", 0},
	{26, "frame-buffer interface timeout", Decode, "CONTACT_SUPPORT", 0},
	{27, "video processor fault", Decode, "CONTACT_SUPPORT", 0},
	{28, "video processor 2 fault", Decode, "CONTACT_SUPPORT", 0},
	{29, "bitstream processor fault", Decode, "CONTACT_SUPPORT", 0},
	{30, "access to a bad address", Decode, "CONTACT_SUPPORT", 0},
	{31, "MMU page fault", Application, "RESTART_APP", 0},
	{32, "PBDMA error", Application, "RESTART_APP", 0},
	{33, "security engine fault", Decode, "CONTACT_SUPPORT", 0},
	{34, "video bitstream decoder (MSVLD) fault", Decode, "CONTACT_SUPPORT", 0},
	{35, "video picture decoder (MSPDEC) fault", Decode, "CONTACT_SUPPORT", 0},
	{36, "video post-processor (MSPPP) fault", Decode, "CONTACT_SUPPORT", 0},
	{37, "FECS: method not implemented in firmware", Informational, "IGNORE", 0},
	{38, "FECS watchdog timeout", Informational, "IGNORE", 0},
	{39, "copy engine 0 fault", Application, "RESTART_APP", 0},
	{40, "copy engine 1 fault", Application, "RESTART_APP", 0},
	{41, "copy engine 2 fault", Application, "RESTART_APP", 0},
	{42, "video image compositor fault", Decode, "CONTACT_SUPPORT", 0},
	{43, "channel reset after an application fault", Application, "IGNORE", 0},
	{44, "graphics fault during context switch", Informational, "IGNORE", 0},
	{45, "preemptive channel removal", Application, "WORKFLOW_XID_45", 0},
	{46, "GPU timeout", Transient, "RESET_GPU", 0},
	{47, "NVENC0 fault", Decode, "CONTACT_SUPPORT", 0},
	{48, "double-bit ECC error", Transient, "WORKFLOW_XID_48", 565},
	{49, "silent running: level set by the registry", Decode, "CONTACT_SUPPORT", 0},
	{50, "silent running: level changed after an error", Decode, "CONTACT_SUPPORT", 0},
	{51, "silent running: stress test failed", Decode, "CONTACT_SUPPORT", 0},
	{52, "silent running: level changed by heat", Decode, "CONTACT_SUPPORT", 0},
	{53, "silent running: clocks lowered by heat", Decode, "CONTACT_SUPPORT", 0},
	{54, "auxiliary power missing", Hardware, "CHECK_MECHANICALS", 0},
	{55, "silent running: temperature not readable", Decode, "CONTACT_SUPPORT", 0},
	{56, "display channel exception", Decode, "CONTACT_SUPPORT", 0},
	{57, "frame-buffer link training failed", Decode, "CONTACT_SUPPORT", 0},
	{58, "frame-buffer memory error", Decode, "CONTACT_SUPPORT", 0},
	{59, "PMU error", Decode, "CONTACT_SUPPORT", 0},
	{60, "SEC2 or video processor exception", Application, "RESTART_APP", 0},
	{61, "PMU breakpoint", Decode, "CONTACT_SUPPORT", 0},
	{62, "PMU microcontroller halt", Transient, "RESET_GPU", 565},
	{63, "row remapping or page retirement recorded", Informational, "IGNORE", 565},
	{64, "row remapping or page retirement failed", Hardware, "RESET_GPU", 565},
	{65, "NVENC1 fault", Decode, "CONTACT_SUPPORT", 0},
	{66, "FECS illegal register access", Informational, "IGNORE", 0},
	{67, "FECS verification violation", Informational, "IGNORE", 0},
	{68, "NVDEC0 fault", Application, "RESTART_APP", 0},
	{69, "graphics class error", Application, "RESTART_APP", 0},
	{70, "copy engine 3 fault", Application, "RESTART_APP", 0},
	{71, "copy engine 4 fault", Application, "RESTART_APP", 0},
	{72, "copy engine 5 fault", Application, "RESTART_APP", 0},
	{73, "NVENC2 fault", Decode, "CONTACT_SUPPORT", 0},
	{74, "NVLink error", Transient, "WORKFLOW_NVLINK_ERR", 565},
	{75, "copy engine 6 fault", Application, "RESTART_APP", 0},
	{76, "copy engine 7 fault", Application, "RESTART_APP", 0},
	{77, "copy engine 8 fault", Application, "RESTART_APP", 0},
	{78, "vGPU could not start", Informational, "UPDATE_SWFW", 0},
	{79, "GPU fell off the bus", Hardware, "RESTART_BM", 565},
	{80, "push-buffer CRC mismatch", Application, "RESTART_APP", 0},
	{81, "VGA subsystem error", Decode, "CONTACT_SUPPORT", 0},
	{82, "NVJPG0 fault", Application, "RESTART_APP", 0},
	{83, "NVDEC1 fault", Application, "RESTART_APP", 0},
	{84, "NVDEC2 fault", Application, "RESTART_APP", 0},
	{85, "copy engine 9 fault", Application, "RESTART_APP", 0},
	{86, "OFA0 fault", Application, "RESTART_APP", 0},
	{87, "driver telemetry report", Decode, "CONTACT_SUPPORT", 0},
	{88, "NVDEC3 fault", Application, "RESTART_APP", 0},
	{89, "NVDEC4 fault", Application, "RESTART_APP", 0},
	{90, "L2 cache error", Decode, "CONTACT_SUPPORT", 0},
	{91, "reserved", Decode, "CONTACT_SUPPORT", 0},
	{92, "high single-bit ECC rate", Informational, "IGNORE", 0},
	{93, "InfoROM wear limit passed", Informational, "IGNORE", 0},
	{94, "contained memory error", Application, "RESTART_APP", 565},
	{95, "uncontained memory error", Transient, "RESET_GPU", 565},
	{96, "NVDEC5 fault", Application, "RESTART_APP", 0},
	{97, "NVDEC6 fault", Application, "RESTART_APP", 0},
	{98, "NVDEC7 fault", Application, "RESTART_APP", 0},
	{99, "NVJPG1 fault", Application, "RESTART_APP", 0},
	{100, "NVJPG2 fault", Application, "RESTART_APP", 0},
	{101, "NVJPG3 fault", Application, "RESTART_APP", 0},
	{102, "NVJPG4 fault", Application, "RESTART_APP", 0},
	{103, "NVJPG5 fault", Application, "RESTART_APP", 0},
	{104, "NVJPG6 fault", Application, "RESTART_APP", 0},
	{105, "NVJPG7 fault", Application, "RESTART_APP", 0},
	{106, "SMBPBI test", Informational, "IGNORE", 0},
	{107, "SMBPBI test (silent)", Informational, "IGNORE", 0},
	{108, "NVLink remote translation error", Informational, "IGNORE", 0},
	{109, "context-switch timeout", Transient, "RESET_GPU", 570},
	{110, "security fault", Transient, "RESET_GPU", 565},
	{111, "display bundle error", Decode, "CONTACT_SUPPORT", 0},
	{112, "display supervisor error", Decode, "CONTACT_SUPPORT", 0},
	{113, "DisplayPort link training failed", Decode, "CONTACT_SUPPORT", 0},
	{114, "display head underflow", Decode, "CONTACT_SUPPORT", 0},
	{115, "display core channel registers", Decode, "CONTACT_SUPPORT", 0},
	{116, "display window channel registers", Decode, "CONTACT_SUPPORT", 0},
	{117, "display cursor channel registers", Decode, "CONTACT_SUPPORT", 0},
	{118, "display head registers", Decode, "CONTACT_SUPPORT", 0},
	{119, "GSP RPC timeout", Transient, "RESET_GPU", 0},
	{120, "GSP error", Transient, "RESET_GPU", 565},
	{121, "chip-to-chip link: corrected errors", Informational, "IGNORE", 0},
	{122, "SPI flash: read through the PMU failed", Decode, "CONTACT_SUPPORT", 0},
	{123, "SPI flash: write through the PMU failed", Decode, "CONTACT_SUPPORT", 0},
	{124, "SPI flash: erase through the PMU failed", Decode, "CONTACT_SUPPORT", 0},
	{125, "InfoROM file system error", Decode, "CONTACT_SUPPORT", 0},
	{126, "copy engine 10 fault", Application, "RESTART_APP", 0},
	{127, "copy engine 11 fault", Application, "RESTART_APP", 0},
	{128, "copy engine 12 fault", Application, "RESTART_APP", 0},
	{129, "copy engine 13 fault", Application, "RESTART_APP", 0},
	{130, "copy engine 14 fault", Application, "RESTART_APP", 0},
	{131, "copy engine 15 fault", Application, "RESTART_APP", 0},
	{132, "copy engine 16 fault", Application, "RESTART_APP", 0},
	{133, "copy engine 17 fault", Application, "RESTART_APP", 0},
	{134, "copy engine 18 fault", Application, "RESTART_APP", 0},
	{135, "copy engine 19 fault", Application, "RESTART_APP", 0},
	{136, "link training failed", Transient, "RESET_GPU", 565},
	{137, "NVLink privilege fault", Application, "IGNORE", 0},
	{138, "deep-learning accelerator fault", Decode, "CONTACT_SUPPORT", 0},
	{139, "OFA1 fault", Application, "RESTART_APP", 0},
	{140, "unrecovered ECC escape", Transient, "RESET_GPU", 0},
	{141, "CUDA fast-path error", Informational, "IGNORE", 0},
	{142, "NVENC3 fault", Application, "CONTACT_SUPPORT", 0},
	{143, "GPU initialization failed", Transient, "RESET_GPU", 575},
	{144, "NVLink5 SAW unit error", Decode, "WORKFLOW_NVLINK5_ERR", 565},
	{145, "NVLink5 RLW unit error", Decode, "WORKFLOW_NVLINK5_ERR", 565},
	{146, "NVLink5 TLW unit error", Decode, "WORKFLOW_NVLINK5_ERR", 565},
	{147, "NVLink5 TREX unit error", Decode, "WORKFLOW_NVLINK5_ERR", 565},
	{148, "NVLink5 NVLPW_CTRL unit error", Decode, "WORKFLOW_NVLINK5_ERR", 565},
	{149, "NVLink5 NETIR unit error", Decode, "WORKFLOW_NVLINK5_ERR", 565},
	{150, "NVLink5 MSE unit error", Decode, "WORKFLOW_NVLINK5_ERR", 565},
	{151, "confidential computing: key rotation failed", Transient, "RESTART_VM", 0},
	{152, "DLA SMMU error", Informational, "IGNORE", 0},
	{153, "DLA timeout", Informational, "IGNORE", 0},
	{154, "recovery action changed", Decode, "XID_154", 0},
	{155, "NVLink error defined by software", Transient, "RESET_GPU", 565},
	{156, "resource retired", Transient, "RESET_GPU", 565},
	{157, "resource retirement failed: none left", Informational, "IGNORE", 0},
	{158, "GPU fatal timeout", Transient, "RESET_GPU", 575},
	{159, "coherent-link error without data", Decode, "CHECK_UVM", 575},
	{160, "channel retired", Decode, "IGNORE", 575},
	{161, "channel retirement failed", Decode, "IGNORE", 575},
	{162, "power smoothing engaged again", Informational, "", 0},
	{163, "power smoothing disengaged", Informational, "", 0},
	{164, "power smoothing: little lifetime left", Informational, "", 0},
	{165, "power smoothing: lifetime used up", Informational, "", 0},
	{166, "NVLink encryption could not be set up", Decode, "", 0},
	{167, "PCIe fatal timeout", Decode, "", 0},
	{168, "memory capacity reduced", Decode, "", 0},
	{169, "SEC2 microcontroller halt", Decode, "", 0},
	{170, "NVLink secure-mode fault", Decode, "", 0},
	{171, "detail of a double-bit ECC error: DRAM", Decode, "", 0},
	{172, "detail of a double-bit ECC error: SRAM", Decode, "", 0},
	{173, "chip-to-chip link failed", Decode, "", 0},
	{174, "channel reset, process ended silently", Decode, "", 0},
	{175, "memory subsystem error", Decode, "", 0},
	{176, "PCIe correctable error", Decode, "", 0},
	{185, "memory sparing state changed", Decode, "", 0},
}
