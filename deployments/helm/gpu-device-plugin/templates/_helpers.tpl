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

{{- /* The variables that say which configuration file counts, or how the label of the node chooses it. */}}
{{- define "gpu-device-plugin.configEnv" -}}
{{- if .Values.features.nodeConfig }}
- {name: CONFIG_FILE_SRCDIR, value: /config}
{{- range list
  (list "NODE_LABEL" .Values.features.nodeConfigLabel)
  (list "DEFAULT_CONFIG" .Values.config.default)
  (list "FALLBACK_STRATEGIES" (join "," .Values.config.fallbackStrategies))
}}
{{- if last . }}
- {name: {{ first . }}, value: {{ last . | toString | quote }}}
{{- end }}
{{- end }}
{{- else if include "gpu-device-plugin.configMap" . }}
- {name: CONFIG_FILE, value: {{ printf "/config/%s" (include "gpu-device-plugin.configFile" .) | quote }}}
{{- end }}
{{- end }}

{{- /* The configuration files that may count, as a JSON list of texts, as far as the chart can see them: not those of config.name. */}}
{{- define "gpu-device-plugin.files" -}}
{{- $files := list }}
{{- if .Values.config.map }}
{{- if .Values.features.nodeConfig }}
{{- $files = values .Values.config.map }}
{{- else }}
{{- $files = list (get .Values.config.map (include "gpu-device-plugin.configFile" .)) }}
{{- end }}
{{- end }}
{{- $files | toJson }}
{{- end }}

{{- /* Whether NVML may be asked for MIG devices, for which it wants CAP_SYS_ADMIN. The value counts before the file. What the file
of config.name says is not known here. */}}
{{- define "gpu-device-plugin.maySeeMIG" -}}
{{- $may := ne "none" (toString (default "none" .Values.migStrategy)) }}
{{- if kindIs "invalid" .Values.migStrategy }}
{{- $may = ne "" .Values.config.name }}
{{- range include "gpu-device-plugin.files" . | fromJsonArray }}
{{- with fromYaml . }}{{ with .flags }}{{ $may = or $may (ne "none" (toString (default "none" .migStrategy))) }}{{ end }}{{ end }}
{{- end }}
{{- end }}
{{- if $may }}true{{ end }}
{{- end }}

{{- /* Whether the daemon may have to write CDI specs. */}}
{{- define "gpu-device-plugin.cdi" -}}
{{- $enabled := .Values.cdi.enabled }}
{{- if kindIs "invalid" $enabled }}
{{- $enabled = contains "cdi" (toString .Values.deviceListStrategy) }}
{{- if kindIs "invalid" .Values.deviceListStrategy }}
{{- $enabled = ne "" .Values.config.name }}
{{- range include "gpu-device-plugin.files" . | fromJsonArray }}
{{- with fromYaml . }}{{ with .flags }}{{ with .plugin }}{{ $enabled = or $enabled (contains "cdi" (toString .deviceListStrategy)) }}{{ end }}{{ end }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- if $enabled }}true{{ end }}
{{- end }}

{{- /* Whether GPUs are shared by MPS. */}}
{{- define "gpu-device-plugin.mps" -}}
{{- $enabled := .Values.mps.enabled }}
{{- if kindIs "invalid" $enabled }}
{{- range include "gpu-device-plugin.files" . | fromJsonArray }}
{{- with fromYaml . }}{{ with .sharing }}{{ $enabled = or $enabled .mps }}{{ end }}{{ end }}
{{- end }}
{{- end }}
{{- if $enabled }}true{{ end }}
{{- end }}

{{- /* The features that may be on, a JSON list of words: labels-file, labels-nodeFeature, labels-node, events, podEvents, condition,
taint, nodeConfig. A value counts before the files. */}}
{{- define "gpu-device-plugin.features" -}}
{{- $on := dict }}
{{- if .Values.features.nodeConfig }}{{ $_ := set $on "nodeConfig" true }}{{ end }}
{{- range $name := list "labels" "events" "podEvents" "condition" "taint" }}
{{- $asked := list (get $.Values.features $name) }}
{{- if kindIs "invalid" (first $asked) }}
{{- $asked = list }}
{{- range include "gpu-device-plugin.files" $ | fromJsonArray }}
{{- with fromYaml . }}{{ with .features }}{{ $asked = append $asked (get . $name) }}{{ end }}{{ end }}
{{- end }}
{{- end }}
{{- range $value := $asked }}
{{- if ne $name "labels" }}
{{- if eq "true" (toString $value) }}{{ $_ := set $on $name true }}{{ end }}
{{- else if has (toString $value) (list "file" "nodeFeature" "node") }}
{{- $_ := set $on (printf "labels-%s" $value) true }}
{{- end }}
{{- end }}
{{- end }}
{{- keys $on | sortAlpha | toJson }}
{{- end }}

{{- /* Whether a feature may be on, from a list of: root, words of gpu-device-plugin.features, of which one is enough. */}}
{{- define "gpu-device-plugin.feature" -}}
{{- $on := include "gpu-device-plugin.features" (first .) | fromJsonArray }}
{{- $found := false }}
{{- range rest . }}{{ if has . $on }}{{ $found = true }}{{ end }}{{ end }}
{{- if $found }}true{{ end }}
{{- end }}

{{- /* Whether a feature needs the API server: then gpu-node-agent runs, with a service account. */}}
{{- define "gpu-device-plugin.agent" -}}
{{- include "gpu-device-plugin.feature" (list . "labels-nodeFeature" "labels-node" "events" "condition" "taint" "nodeConfig") }}
{{- end }}

{{- define "gpu-device-plugin.serviceAccount" -}}
{{- default (include "gpu-device-plugin.fullname" .) .Values.serviceAccount.name }}
{{- end }}

{{- /* The types of the condition that may be written, as a JSON list. */}}
{{- define "gpu-device-plugin.conditionTypes" -}}
{{- $types := dict (default "GPUHealthy" .Values.features.conditionType) true }}
{{- if not .Values.features.conditionType }}
{{- range include "gpu-device-plugin.files" . | fromJsonArray }}
{{- with fromYaml . }}{{ with .features }}{{ with .conditionType }}{{ $_ := set $types . true }}{{ end }}{{ end }}{{ end }}
{{- end }}
{{- end }}
{{- keys $types | sortAlpha | toJson }}
{{- end }}

{{- /* The keys of labels that describe GPUs, as a regular expression in CEL. Not those by which others tell the node something,
such as nvidia.com/mig.config. */}}
{{- define "gpu-device-plugin.labelKeys" -}}
{{- $device := "(product|count|replicas|sharing-strategy|memory|multiprocessors|slices[.](gi|ci)|engines[.](copy|decoder|encoder|jpeg|ofa))" }}
{{- $node := "gfd[.]timestamp|cuda[.][a-z.-]+|mig[.](capable|strategy)|mps[.]capable|vgpu[.][a-z-]+" }}
{{- $gpu := printf "gpu[.](present|machine|mode|clique|family|compute[.](major|minor)|%s)|mig-[0-9][0-9a-z.-]*[.]%s" $device $device }}
{{- printf "'^(nvidia[.]com/(%s|%s)|gpu-device-plugin[.]github[.]io/gpu[.](health|link)|feature[.]node[.]kubernetes[.]io/pci-10de[.]present)$'" $node $gpu }}
{{- end }}

{{- /* What tolerates the taint of the daemon's own. The taint may be there from a time when features.taint was on. */}}
{{- define "gpu-device-plugin.tolerations" -}}
{{- $tolerations := .Values.tolerations }}
{{- if include "gpu-device-plugin.agent" . }}
{{- $tolerations = append $tolerations (dict "key" "gpu-device-plugin.github.io/no-healthy-gpu" "operator" "Exists" "effect" "NoSchedule") }}
{{- end }}
{{- with $tolerations }}{{ toYaml . }}{{ end }}
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
{{- fail "gfd.enabled: the daemon itself writes the labels of GPU feature discovery; set features.labels to file, nodeFeature or node" }}
{{- end }}
{{- $plugin := default dict (get .Values "devicePlugin") }}
{{- if and (hasKey $plugin "enabled") (not $plugin.enabled) }}
{{- fail "devicePlugin.enabled is false, and this chart is the device plugin: do not install it" }}
{{- end }}
{{- if and (include "gpu-device-plugin.feature" (list . "podEvents")) (not (include "gpu-device-plugin.feature" (list . "events"))) }}
{{- fail "features.podEvents needs features.events" }}
{{- end }}
{{- if .Values.features.nodeConfig }}
{{- if not (or .Values.config.map .Values.config.name) }}
{{- fail "features.nodeConfig: a label of the node chooses one of the files of config.map or config.name, and neither is given" }}
{{- end }}
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
