{{- define "gpu-device-plugin.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "gpu-device-plugin.fullname" -}}
{{- $name := include "gpu-device-plugin.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "gpu-device-plugin.selector" -}}
app.kubernetes.io/name: {{ include "gpu-device-plugin.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* Another name, so that neither DaemonSet selects the pods of the other. */}}
{{- define "gpu-device-plugin.mpsSelector" -}}
app.kubernetes.io/name: {{ include "gpu-device-plugin.name" . | trunc 44 | trimSuffix "-" }}-mps-control-daemon
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gpu-device-plugin.labels" -}}
{{ include "gpu-device-plugin.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- /* The name of the ConfigMap with the configuration file; empty where there is none. */}}
{{- define "gpu-device-plugin.configMap" -}}
{{- if and .Values.config.map .Values.config.name }}
{{- fail "config.map and config.name are both given: the chart makes a ConfigMap from map, or takes the one with that name" }}
{{- else if .Values.config.name }}
{{- .Values.config.name }}
{{- else if .Values.config.map }}
{{- printf "%s-config" (include "gpu-device-plugin.fullname" .) }}
{{- end }}
{{- end }}

{{- /* The file of that ConfigMap that counts. */}}
{{- define "gpu-device-plugin.configFile" -}}
{{- $files := keys .Values.config.map | sortAlpha }}
{{- $file := .Values.config.default }}
{{- if not $file }}
{{- range .Values.config.fallbackStrategies }}
{{- if $file }}
{{- else if eq . "named" }}
{{- if has "default" $files }}{{ $file = "default" }}{{ end }}
{{- else if eq . "single" }}
{{- if eq (len $files) 1 }}{{ $file = first $files }}{{ end }}
{{- else if eq . "empty" }}
{{- fail "config.fallbackStrategies comes to empty: leave config.map and config.name out for no configuration file" }}
{{- else }}
{{- fail (printf "config.fallbackStrategies has %q: known are named and single" .) }}
{{- end }}
{{- end }}
{{- if not $file }}
{{- fail "config.default is empty: say which file of the ConfigMap is the configuration" }}
{{- end }}
{{- else if and $files (not (has $file $files)) }}
{{- fail (printf "config.default is %q, and config.map has only %s" $file (join ", " $files)) }}
{{- end }}
{{- $file }}
{{- end }}

{{- /* The configuration file as YAML, as far as the chart can see it: not that of config.name. */}}
{{- define "gpu-device-plugin.fileText" -}}
{{- if .Values.config.map }}{{ get .Values.config.map (include "gpu-device-plugin.configFile" .) }}{{ end }}
{{- end }}

{{- /* Whether NVML may be asked for MIG devices, for which it wants CAP_SYS_ADMIN. The value counts before the file. What the file
of config.name says is not known here. */}}
{{- define "gpu-device-plugin.maySeeMIG" -}}
{{- $strategy := .Values.migStrategy }}
{{- if kindIs "invalid" $strategy }}
{{- if .Values.config.name }}{{ $strategy = "of that file" }}{{ end }}
{{- with fromYaml (include "gpu-device-plugin.fileText" .) }}{{ with .flags }}{{ $strategy = .migStrategy }}{{ end }}{{ end }}
{{- end }}
{{- if ne "none" (toString (default "none" $strategy)) }}true{{ end }}
{{- end }}

{{- /* Whether the daemon may have to write CDI specs. */}}
{{- define "gpu-device-plugin.cdi" -}}
{{- $enabled := .Values.cdi.enabled }}
{{- if kindIs "invalid" $enabled }}
{{- $strategy := .Values.deviceListStrategy }}
{{- if kindIs "invalid" $strategy }}
{{- if .Values.config.name }}{{ $strategy = "cdi of that file" }}{{ end }}
{{- with fromYaml (include "gpu-device-plugin.fileText" .) }}{{ with .flags }}{{ with .plugin }}{{ $strategy = .deviceListStrategy }}{{ end }}{{ end }}{{ end }}
{{- end }}
{{- $enabled = contains "cdi" (toString $strategy) }}
{{- end }}
{{- if $enabled }}true{{ end }}
{{- end }}

{{- /* Whether GPUs are shared by MPS. */}}
{{- define "gpu-device-plugin.mps" -}}
{{- $enabled := .Values.mps.enabled }}
{{- if kindIs "invalid" $enabled }}
{{- with fromYaml (include "gpu-device-plugin.fileText" .) }}{{ with .sharing }}{{ $enabled = .mps }}{{ end }}{{ end }}
{{- end }}
{{- if $enabled }}true{{ end }}
{{- end }}

{{- /* Whether the container needs CAP_SYS_ADMIN: for MIG devices, to take back what work leaves on GPUs, or because NVIDIA's
runtime may be set up to ignore NVIDIA_VISIBLE_DEVICES of containers without it, as for volume-mounts. */}}
{{- define "gpu-device-plugin.admin" -}}
{{- $mounts := contains "volume-mounts" (toString .Values.deviceListStrategy) }}
{{- if or (include "gpu-device-plugin.maySeeMIG" .) .Values.preStartReset $mounts }}true{{ end }}
{{- end }}

{{- /* Keys of NVIDIA's chart that ask for what this chart does not do: better refused than passed over. */}}
{{- define "gpu-device-plugin.refuse" -}}
{{- if get (default dict (get .Values "gfd")) "enabled" }}
{{- fail "gfd.enabled: GPU feature discovery is no part of this chart; install it by itself" }}
{{- end }}
{{- $plugin := default dict (get .Values "devicePlugin") }}
{{- if and (hasKey $plugin "enabled") (not $plugin.enabled) }}
{{- fail "devicePlugin.enabled is false, and this chart is the device plugin: do not install it" }}
{{- end }}
{{- end }}

{{- /* The address at which metrics are served. An address in brackets may be one of IPv4, too. */}}
{{- define "gpu-device-plugin.metricsAddress" -}}
{{- $hosts := dict "pod" "[$(POD_IP)]" "loopback" "127.0.0.1" "all" "" }}
{{- if not (hasKey $hosts .Values.metrics.listen) }}
{{- fail (printf "metrics.listen is %q: known are pod, loopback and all" .Values.metrics.listen) }}
{{- end }}
{{- printf "%s:%v" (get $hosts .Values.metrics.listen) .Values.metrics.port }}
{{- end }}

{{- /* Whether kubelet and Prometheus can reach the port. */}}
{{- define "gpu-device-plugin.port" -}}
{{- if and .Values.metrics.enabled (ne .Values.metrics.listen "loopback") }}true{{ end }}
{{- end }}

{{- /* A probe, from a list of: root, the value, a path for a port that is open, and otherwise a command. */}}
{{- define "gpu-device-plugin.probe" -}}
{{- $probe := index . 1 }}
{{- if not (or $probe.exec $probe.httpGet) }}
{{- if include "gpu-device-plugin.port" (first .) }}
httpGet: {path: {{ index . 2 | quote }}, port: metrics}
{{- else }}
exec: {command: [gpu-device-plugin, {{ slice . 3 | join ", " }}]}
{{- end }}
{{- end }}
{{ toYaml $probe }}
{{- end }}
