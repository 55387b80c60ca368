package nvidia

import (
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Methods of a device for samples only.

// GetTemperature returns degrees Celsius. CUDA 14 may drop the function without a version.
func (d device) GetTemperature() (uint32, nvml.Return) {
	celsius, ret := query(d, "GetTemperature", func() (uint32, nvml.Return) {
		return d.handle.GetTemperature(nvml.TEMPERATURE_GPU)
	})
	if ret != nvml.ERROR_FUNCTION_NOT_FOUND {
		return celsius, ret
	}
	return query(d, "GetTemperatureV", func() (uint32, nvml.Return) {
		t, ret := d.handle.GetTemperatureV().V1()
		return uint32(max(t.Temperature, 0)), ret
	})
}

// GetPowerUsage returns milliwatts.
func (d device) GetPowerUsage() (uint32, nvml.Return) {
	return query(d, "GetPowerUsage", d.handle.GetPowerUsage)
}

// GetClockInfo returns MHz.
func (d device) GetClockInfo(clock nvml.ClockType) (uint32, nvml.Return) {
	return queryFor(d, "GetClockInfo", int(clock),
		func(int) (uint32, nvml.Return) { return d.handle.GetClockInfo(clock) })
}

// GetMaxClockInfo returns MHz.
func (d device) GetMaxClockInfo(clock nvml.ClockType) (uint32, nvml.Return) {
	return queryFor(d, "GetMaxClockInfo", int(clock), func(int) (uint32, nvml.Return) {
		return d.handle.GetMaxClockInfo(clock)
	})
}

// GetEnforcedPowerLimit returns milliwatts.
func (d device) GetEnforcedPowerLimit() (uint32, nvml.Return) {
	return query(d, "GetEnforcedPowerLimit", d.handle.GetEnforcedPowerLimit)
}

func (d device) GetUtilizationRates() (nvml.Utilization, nvml.Return) {
	return query(d, "GetUtilizationRates", d.handle.GetUtilizationRates)
}

// GetEncoderUtilization returns percent.
func (d device) GetEncoderUtilization() (uint32, nvml.Return) {
	return query(d, "GetEncoderUtilization", func() (uint32, nvml.Return) {
		percent, _, ret := d.handle.GetEncoderUtilization()
		return percent, ret
	})
}

// GetDecoderUtilization returns percent.
func (d device) GetDecoderUtilization() (uint32, nvml.Return) {
	return query(d, "GetDecoderUtilization", func() (uint32, nvml.Return) {
		percent, _, ret := d.handle.GetDecoderUtilization()
		return percent, ret
	})
}

func (d device) GetMemoryInfoV2() (nvml.Memory_v2, nvml.Return) {
	return query(d, "GetMemoryInfo_v2", d.handle.GetMemoryInfo_v2)
}

// GetGridLicensed reports whether any feature of GetGridLicensableFeatures is licensed and in use.
func (d device) GetGridLicensed() (bool, nvml.Return) {
	return query(d, "GetGridLicensableFeatures", func() (bool, nvml.Return) {
		all, ret := d.handle.GetGridLicensableFeatures()
		count := min(int(all.LicensableFeaturesCount), len(all.GridLicensableFeatures))
		return slices.ContainsFunc(all.GridLicensableFeatures[:count], func(f nvml.GridLicensableFeature) bool {
			return f.FeatureState != 0
		}), ret
	})
}

func (d device) GetTotalEccErrors(kind nvml.MemoryErrorType, counter nvml.EccCounterType) (uint64, nvml.Return) {
	which := int(kind)<<8 | int(counter)
	return queryFor(d, "GetTotalEccErrors", 1+which, func(int) (uint64, nvml.Return) {
		return d.handle.GetTotalEccErrors(kind, counter)
	})
}

// GetScopedFieldValue is GetFieldValue for a part of the GPU, such as one of its NVLinks.
func (d device) GetScopedFieldValue(field int, scope uint32) (nvml.FieldValue, nvml.Return) {
	return queryFor(d, "GetFieldValues", field, func(field int) (nvml.FieldValue, nvml.Return) {
		values := [1]nvml.FieldValue{{FieldId: uint32(field), ScopeId: scope}}
		ret := d.handle.GetFieldValues(values[:])
		if ret == nvml.SUCCESS {
			ret = nvml.Return(values[0].NvmlReturn)
		}
		return values[0], ret
	})
}

// GetPcieThroughput returns KB a second. It blocks for 20 ms.
func (d device) GetPcieThroughput(counter nvml.PcieUtilCounter) (uint32, nvml.Return) {
	return queryFor(d, "GetPcieThroughput", int(counter), func(int) (uint32, nvml.Return) {
		return d.handle.GetPcieThroughput(counter)
	})
}

func (d device) GetCurrPcieLinkGeneration() (int, nvml.Return) {
	return query(d, "GetCurrPcieLinkGeneration", d.handle.GetCurrPcieLinkGeneration)
}

func (d device) GetCurrPcieLinkWidth() (int, nvml.Return) {
	return query(d, "GetCurrPcieLinkWidth", d.handle.GetCurrPcieLinkWidth)
}

func (d device) GetMaxPcieLinkGeneration() (int, nvml.Return) {
	return query(d, "GetMaxPcieLinkGeneration", d.handle.GetMaxPcieLinkGeneration)
}

func (d device) GetMaxPcieLinkWidth() (int, nvml.Return) {
	return query(d, "GetMaxPcieLinkWidth", d.handle.GetMaxPcieLinkWidth)
}
