{{- /* A name of at most so many characters, from a list of: the number, the name. One that is cut may not end in a dash or a dot. */}}
{{- define "gpu-device-plugin.cut" -}}
{{- regexReplaceAll "[-._]+$" (trunc (first .) (last .)) "" }}
{{- end }}

{{- define "gpu-device-plugin.name" -}}
{{- include "gpu-device-plugin.cut" (list 63 (default .Chart.Name .Values.nameOverride)) }}
{{- end }}

{{- define "gpu-device-plugin.fullname" -}}
{{- $name := include "gpu-device-plugin.name" . }}
{{- if .Values.fullnameOverride }}
{{- include "gpu-device-plugin.cut" (list 63 .Values.fullnameOverride) }}
{{- else if contains $name .Release.Name }}
{{- include "gpu-device-plugin.cut" (list 63 .Release.Name) }}
{{- else }}
{{- include "gpu-device-plugin.cut" (list 63 (printf "%s-%s" .Release.Name $name)) }}
{{- end }}
{{- end }}

{{- define "gpu-device-plugin.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride }}
{{- end }}

{{- define "gpu-device-plugin.image" -}}
{{- /* A number of a values file is a float, which JSON alone writes without an exponent. */}}
{{- printf "%s:%s" .Values.image.repository (toJson (default .Chart.AppVersion .Values.image.tag) | trimAll "\"") }}
{{- end }}

{{- define "gpu-device-plugin.nameLabels" -}}
app.kubernetes.io/name: {{ include "gpu-device-plugin.name" . | toYaml }}
app.kubernetes.io/instance: {{ .Release.Name | toYaml }}
{{- end }}

{{- define "gpu-device-plugin.selector" -}}
{{- if .Values.selectorLabelsOverride }}
{{- toYaml .Values.selectorLabelsOverride }}
{{- else }}
{{- include "gpu-device-plugin.nameLabels" . }}
{{- if (default dict .Values.componentSelectorLabels).enabled }}
app.kubernetes.io/component: device-plugin
{{- end }}
{{- end }}
{{- end }}

{{- /* The labels of the daemon's pods, which the selector selects. */}}
{{- define "gpu-device-plugin.podLabels" -}}
{{- $selector := include "gpu-device-plugin.selector" . | fromYaml }}
{{- mergeOverwrite (include "gpu-device-plugin.nameLabels" . | fromYaml) (default dict .Values.podLabels) $selector | toYaml }}
{{- end }}

{{- /* Another name, so that neither DaemonSet selects the pods of the other. */}}
{{- define "gpu-device-plugin.mpsSelector" -}}
app.kubernetes.io/name: {{ include "gpu-device-plugin.cut" (list 44 (include "gpu-device-plugin.name" .)) }}-mps-control-daemon
app.kubernetes.io/instance: {{ .Release.Name | toYaml }}
{{- if (default dict .Values.componentSelectorLabels).enabled }}
app.kubernetes.io/component: mps-control-daemon
{{- end }}
{{- end }}

{{- define "gpu-device-plugin.labels" -}}
{{ include "gpu-device-plugin.nameLabels" . }}
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

{{- /* The file of that ConfigMap that counts for a node without a label; empty where it is none of them. */}}
{{- define "gpu-device-plugin.configFile" -}}
{{- $files := keys (default dict .Values.config.map) | sortAlpha }}
{{- $file := default "" .Values.config.default }}
{{- $found := ne "" $file }}
{{- range .Values.config.fallbackStrategies }}
{{- if not (has . (list "named" "single" "empty")) }}
{{- fail (printf "config.fallbackStrategies has %q: known are named, single and empty" .) }}
{{- end }}
{{- if $found }}
{{- else if and (eq . "named") (has "default" $files) }}
{{- $file = "default" }}{{ $found = true }}
{{- else if and (eq . "single") (eq (len $files) 1) }}
{{- $file = first $files }}{{ $found = true }}
{{- else if eq . "empty" }}
{{- $found = true }}
{{- end }}
{{- end }}
{{- if and $files (not $found) }}
{{- fail (printf "config.default is empty, and config.fallbackStrategies choose none of %s: say which file is the configuration" (join ", " $files)) }}
{{- else if and $files $file (not (has $file $files)) }}
{{- fail (printf "config.default is %q, and config.map has only %s" $file (join ", " $files)) }}
{{- end }}
{{- $file }}
{{- end }}

{{- /* Whether a label of the node chooses the file: as with NVIDIA's chart where there is a choice. */}}
{{- define "gpu-device-plugin.nodeConfig" -}}
{{- $on := .Values.features.nodeConfig }}
{{- if kindIs "invalid" $on }}
{{- $files := len (default dict .Values.config.map) }}
{{- $on = or .Values.config.name (gt $files 1) (and (eq $files 1) (not (include "gpu-device-plugin.configFile" .))) }}
{{- end }}
{{- if $on }}true{{ end }}
{{- end }}

{{- /* The variables that say which configuration file counts, or how the label of the node chooses it. */}}
{{- define "gpu-device-plugin.configEnv" -}}
{{- $file := include "gpu-device-plugin.configFile" . }}
{{- if include "gpu-device-plugin.nodeConfig" . }}
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
{{- if $file }}
- {name: CONFIG_FILE, value: {{ printf "/config/%s" $file | quote }}}
{{- else if .Values.config.name }}
{{- fail "config.default is empty, and features.nodeConfig is false: say which file of the ConfigMap config.name is the configuration" }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The configuration files that may count, as a JSON list of texts, as far as the chart can see them: not those of config.name. */}}
{{- define "gpu-device-plugin.files" -}}
{{- $files := list }}
{{- $file := include "gpu-device-plugin.configFile" . }}
{{- $chooses := include "gpu-device-plugin.nodeConfig" . }}
{{- range $name, $text := ternary dict (default dict .Values.config.map) (not (empty .Values.config.name)) }}
{{- if or $chooses (eq $name $file) }}
{{- include "gpu-device-plugin.refuseFile" (list $name (fromYaml $text)) }}
{{- $files = append $files $text }}
{{- end }}
{{- end }}
{{- $files | toJson }}
{{- end }}

{{- /* A file of config.map, from a list of its name and its content, in which the chart would not find what needs rights. The daemon takes keys
in any case. */}}
{{- define "gpu-device-plugin.refuseFile" -}}
{{- $name := first . }}
{{- $file := last . }}
{{- with $file.Error }}
{{- fail (printf "the file %s of config.map is not a mapping of YAML: %s" $name .) }}
{{- end }}
{{- $known := dict }}
{{- range list "flags" "plugin" "health" "features" "sharing" "mps" "mig" "dra" "units" "selectors" "enforce" "name" "size" "percentage" "migStrategy"
  "nvidiaDriverRoot" "deviceListStrategy" "preStartChecks" "kernelLog" "rebootFile" "repair" "labels" "events" "condition" "conditionTypes" "taint" "changeTaint" "startupTaint" "quiesce" "healthEvents"
  "enabled" "label" "disruption" "mode" "driverName" "dynamicMIG" "claimStatus" }}
{{- $_ := set $known (lower .) . }}
{{- end }}
{{- range $path := list "" "flags" "flags.plugin" "health" "features" "sharing" "mig" "dra" "units" }}
{{- $at := $file }}
{{- range compact (splitList "." $path) }}{{ $at = index (default dict $at) . }}{{ end }}
{{- if not (or (kindIs "invalid" $at) (kindIs "map" $at)) }}
{{- fail (printf "the file %s of config.map has %s, which must be a mapping" $name $path) }}
{{- end }}
{{- range $key, $_ := default dict $at }}
{{- $as := default $key (get $known (lower $key)) }}
{{- if ne $as $key }}
{{- fail (printf "the file %s of config.map has the key %s: write %s, because the chart reads keys in this spelling alone" $name $key $as) }}
{{- end }}
{{- end }}
{{- end }}
{{- if not (or (kindIs "invalid" $file.selectors) (kindIs "slice" $file.selectors)) }}
{{- fail (printf "the file %s of config.map has selectors, which must be a list" $name) }}
{{- end }}
{{- range $file.selectors }}
{{- if not (kindIs "map" .) }}{{ fail (printf "the file %s of config.map has selectors, each of which must be a mapping" $name) }}{{ end }}
{{- end }}
{{- end }}

{{- /* The node's folder that is the driver root in the container: of the value, or else of the file. */}}
{{- define "gpu-device-plugin.driverRoot" -}}
{{- $roots := dict }}
{{- $default := ternary (printf "%s/current" (include "gpu-device-plugin.driverDirectory" .)) "/" (ne "" (include "gpu-device-plugin.changesDriver" .)) }}
{{- if .Values.nvidiaDriverRoot }}
{{- $_ := set $roots .Values.nvidiaDriverRoot true }}
{{- else }}
{{- range include "gpu-device-plugin.files" . | fromJsonArray }}
{{- $_ := set $roots (default $default (default dict (fromYaml .).flags).nvidiaDriverRoot) true }}
{{- end }}
{{- end }}
{{- if gt (len $roots) 1 }}
{{- fail (printf "the files of config.map have several driver roots (%s), and a pod has one: set nvidiaDriverRoot" (keys $roots | sortAlpha | join ", ")) }}
{{- end }}
{{- keys $roots | first | default $default }}
{{- end }}

{{- /* The mountPropagation of a mount of the node that may have other file systems below it. Without propagation, the pod pins each of
them that was mounted when the pod started: the node's unmount leaves the file system in use, and a volume that is detached then loses data. */}}
{{- define "gpu-device-plugin.hostPropagation" -}}
{{- $propagation := .Values.nvidiaDriverRootPropagation | default "HostToContainer" }}
{{- if ne "None" $propagation }}, mountPropagation: {{ $propagation }}{{ end }}
{{- end }}

{{- /* The type of the node's folder that is the driver root. The folder of a driver container may come later. */}}
{{- define "gpu-device-plugin.driverType" -}}
{{- ternary "Directory" "DirectoryOrCreate" (eq "/" (include "gpu-device-plugin.driverRoot" .)) }}
{{- end }}

{{- /* Whether NVML may be asked for MIG devices, for which it wants CAP_SYS_ADMIN. The value counts before the file. What the file
of config.name says is not known here. */}}
{{- define "gpu-device-plugin.maySeeMIG" -}}
{{- $may := ne "none" (toString (default "none" .Values.migStrategy)) }}
{{- if empty .Values.migStrategy }}
{{- $may = not (empty .Values.config.name) }}
{{- range include "gpu-device-plugin.files" . | fromJsonArray }}
{{- with fromYaml . }}{{ with .flags }}{{ $may = or $may (ne "none" (toString (default "none" .migStrategy))) }}{{ end }}{{ end }}
{{- end }}
{{- end }}
{{- if $may }}true{{ end }}
{{- end }}

{{- /* Whether a key of mig or dra has one of some values, from a list of: root, mig or dra, the key, the values; without values, whether
it is true. A value of the chart counts before the files. */}}
{{- define "gpu-device-plugin.says" -}}
{{- $root := first . }}
{{- $section := index . 1 }}
{{- $key := index . 2 }}
{{- $values := default (list "true") (slice . 3) }}
{{- $asked := list (get (get $root.Values $section) $key) }}
{{- if kindIs "invalid" (first $asked) }}
{{- range include "gpu-device-plugin.files" $root | fromJsonArray }}
{{- with get (fromYaml .) $section }}{{ if kindIs "map" . }}{{ $asked = append $asked (get . $key) }}{{ end }}{{ end }}
{{- end }}
{{- end }}
{{- $found := false }}
{{- range $asked }}{{ if has (toString .) $values }}{{ $found = true }}{{ end }}{{ end }}
{{- if $found }}true{{ end }}
{{- end }}

{{- /* Whether the daemon may divide GPUs: as layouts say, or for claims. */}}
{{- define "gpu-device-plugin.divides" -}}
{{- include "gpu-device-plugin.says" (list . "mig" "enabled") }}
{{- if .Values.dra.enabled }}{{ include "gpu-device-plugin.says" (list . "dra" "dynamicMIG") }}{{ end }}
{{- end }}

{{- /* Whether the nodes have no runtime of NVIDIA's. */}}
{{- define "gpu-device-plugin.withoutRuntime" -}}
{{- if eq "none" (toString .Values.runtime) }}true{{ end }}
{{- end }}

{{- /* The device list strategy, as a text; empty where a file says it. */}}
{{- define "gpu-device-plugin.strategy" -}}
{{- $strategy := .Values.deviceListStrategy }}
{{- if kindIs "slice" $strategy }}{{ $strategy = join "," $strategy }}{{ end }}
{{- if and (empty $strategy) (include "gpu-device-plugin.withoutRuntime" .) }}{{ $strategy = "cdi-cri" }}{{ end }}
{{- default "" $strategy }}
{{- end }}

{{- /* Whether the daemon has the node's /dev, in a privileged container: without NVIDIA's runtime, and where it divides or resets GPUs, unless a value says
otherwise. A simulated node has no device nodes. */}}
{{- define "gpu-device-plugin.hostDev" -}}
{{- $own := default dict .Values.securityContext }}
{{- $without := include "gpu-device-plugin.withoutRuntime" . }}
{{- if and (or .Values.hostDev $without) $own (not $own.privileged) }}
{{- fail (printf "%s, and securityContext is not privileged: the container could open no device of the node's /dev" (ternary "runtime is none" "hostDev is true" (ne "" $without))) }}
{{- end }}
{{- $on := .Values.hostDev }}
{{- if kindIs "invalid" $on }}
{{- $on = or $without (and (or (include "gpu-device-plugin.divides" .) (include "gpu-device-plugin.repairs" (list . "idle" "evict"))) (not .Values.simulate) (or (not $own) $own.privileged)) }}
{{- end }}
{{- if $on }}true{{ end }}
{{- end }}

{{- /* Whether the daemon may have to write CDI specs. */}}
{{- define "gpu-device-plugin.cdi" -}}
{{- $enabled := .Values.cdi.enabled }}
{{- if kindIs "invalid" $enabled }}
{{- $strategy := include "gpu-device-plugin.strategy" . }}
{{- $enabled = contains "cdi" $strategy }}
{{- if not $strategy }}
{{- $enabled = not (empty .Values.config.name) }}
{{- range include "gpu-device-plugin.files" . | fromJsonArray }}
{{- with fromYaml . }}{{ with .flags }}{{ with .plugin }}{{ $enabled = or $enabled (contains "cdi" (toString .deviceListStrategy)) }}{{ end }}{{ end }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- if or $enabled .Values.dra.enabled }}true{{ end }}
{{- end }}

{{- /* Whether GPUs are shared by MPS. */}}
{{- define "gpu-device-plugin.mps" -}}
{{- $enabled := .Values.mps.enabled }}
{{- if kindIs "invalid" $enabled }}
{{- range include "gpu-device-plugin.files" . | fromJsonArray }}
{{- with fromYaml . }}{{ with .sharing }}{{ $enabled = or $enabled .mps }}{{ end }}
{{- $enforced := eq (dig "enforce" "mps" (default dict .units)) "mps" }}{{ range .selectors }}{{ $enabled = or $enabled (and .units $enforced) }}{{ end }}{{ end }}
{{- end }}
{{- end }}
{{- if $enabled }}true{{ end }}
{{- end }}

{{- /* Whether the daemon may have one of these modes of repairs, from a list of: root, modes. */}}
{{- define "gpu-device-plugin.repairs" -}}
{{- $root := first . }}
{{- $asked := list $root.Values.repair }}
{{- if kindIs "invalid" $root.Values.repair }}
{{- range include "gpu-device-plugin.files" $root | fromJsonArray }}
{{- with fromYaml . }}{{ with .health }}{{ $asked = append $asked .repair }}{{ end }}{{ end }}
{{- end }}
{{- end }}
{{- $found := false }}
{{- range rest . }}{{ if has . $asked }}{{ $found = true }}{{ end }}{{ end }}
{{- if $found }}true{{ end }}
{{- end }}

{{- /* Whether the daemon may change the driver of its node. In a file with a simulated machine, driver is a version. */}}
{{- define "gpu-device-plugin.wantsDriver" -}}
{{- $asked := list .Values.driver.version }}
{{- if kindIs "invalid" .Values.driver.version }}
{{- range include "gpu-device-plugin.files" . | fromJsonArray }}
{{- with fromYaml . }}{{ with .driver }}{{ if kindIs "map" . }}{{ $asked = append $asked .version }}{{ end }}{{ end }}{{ end }}
{{- end }}
{{- end }}
{{- if compact $asked }}true{{ end }}
{{- end }}

{{- /* The features that may be on, a JSON list of words: labels-file, labels-nodeFeature, labels-node, events, podEvents, condition,
taint, changeTaint, startupTaint, quiesce, healthEvents, nodeConfig, migLabel, migEvict, migPause, rollout, repairEvict, driverEvict, dra. A value counts before the files. */}}
{{- define "gpu-device-plugin.features" -}}
{{- $on := dict }}
{{- if include "gpu-device-plugin.nodeConfig" . }}{{ $_ := set $on "nodeConfig" true }}{{ end }}
{{- if include "gpu-device-plugin.says" (list . "mig" "enabled") }}
{{- if include "gpu-device-plugin.says" (list . "mig" "label") }}{{ $_ := set $on "migLabel" true }}{{ end }}
{{- if include "gpu-device-plugin.says" (list . "mig" "disruption" "evict" "pause") }}{{ $_ := set $on "migEvict" true }}{{ end }}
{{- if include "gpu-device-plugin.says" (list . "mig" "disruption" "pause") }}{{ $_ := set $on "migPause" true }}{{ end }}
{{- if include "gpu-device-plugin.says" (list . "mig" "budget") }}{{ $_ := set $on "rollout" true }}{{ end }}
{{- end }}
{{- if include "gpu-device-plugin.repairs" (list . "plan" "idle" "evict") }}{{ $_ := set $on "rollout" true }}{{ end }}
{{- if include "gpu-device-plugin.wantsDriver" . }}
{{- $_ := set $on "rollout" true }}
{{- if include "gpu-device-plugin.says" (list . "driver" "pods" "evict") }}{{ $_ := set $on "driverEvict" true }}{{ end }}
{{- end }}
{{- if include "gpu-device-plugin.repairs" (list . "evict") }}{{ $_ := set $on "repairEvict" true }}{{ end }}
{{- if .Values.dra.enabled }}{{ $_ := set $on "dra" true }}{{ end }}
{{- if .Values.features.healthEvents }}{{ $_ := set $on "healthEvents" true }}{{ end }}
{{- range $name := list "labels" "events" "condition" "taint" "changeTaint" "startupTaint" "quiesce" }}
{{- $asked := list (get $.Values.features $name) }}
{{- if eq $name "labels" }}{{ $asked = list (include "gpu-device-plugin.labelsValue" $ | fromJson).labels }}{{ end }}
{{- if kindIs "invalid" (first $asked) }}
{{- $asked = list }}
{{- range include "gpu-device-plugin.files" $ | fromJsonArray }}
{{- with fromYaml . }}{{ with .features }}{{ $asked = append $asked (get . $name) }}{{ end }}{{ end }}
{{- end }}
{{- end }}
{{- if and (eq $name "quiesce") (include "gpu-device-plugin.inPlace" $) }}{{ $asked = list true }}{{ end }}
{{- range $value := $asked }}
{{- if ne $name "labels" }}
{{- if has (toString $value) (list "true" "pods") }}{{ $_ := set $on $name true }}{{ end }}
{{- if eq "pods" (toString $value) }}{{ $_ := set $on "podEvents" true }}{{ end }}
{{- else if has (toString $value) (list "file" "nodeFeature" "node") }}
{{- $_ := set $on (printf "labels-%s" $value) true }}
{{- end }}
{{- end }}
{{- end }}
{{- keys $on | sortAlpha | toJson }}
{{- end }}

{{- /* features.labels, as JSON; gfd.enabled asks for labels, too. off is a bool of YAML 1.1. */}}
{{- define "gpu-device-plugin.labelsValue" -}}
{{- $labels := .Values.features.labels }}
{{- if and (kindIs "invalid" $labels) .Values.gfd.enabled }}{{ $labels = "node" }}{{ end }}
{{- if kindIs "bool" $labels }}{{ $labels = ternary "true" "off" $labels }}{{ end }}
{{- dict "labels" $labels | toJson }}
{{- end }}

{{- /* Whether no node-feature-discovery says which nodes have GPUs: NVIDIA's chart brings one with gfd.enabled, this chart does not. The
daemon runs on all nodes then, and labels those with GPUs. */}}
{{- define "gpu-device-plugin.withoutNFD" -}}
{{- if and .Values.gfd.enabled (ne "false" (toString .Values.nfd.enabled)) }}true{{ end }}
{{- end }}

{{- /* The terms of values.yaml's affinity, as JSON. */}}
{{- define "gpu-device-plugin.gpuLabels" -}}
{{- $terms := list }}
{{- range list
  (list "feature.node.kubernetes.io/pci-10de.present" "true")
  (list "feature.node.kubernetes.io/pci-0300_10de.present" "true")
  (list "feature.node.kubernetes.io/pci-0302_10de.present" "true")
  (list "feature.node.kubernetes.io/cpu-model.vendor_id" "NVIDIA")
  (list "nvidia.com/gpu.present" "true")
  (list "gpu-device-plugin.github.io/gpu.health")
  (list "cloud.google.com/gke-accelerator")
  (list "kubernetes.azure.com/accelerator" "nvidia")
  (list "karpenter.azure.com/sku-gpu-manufacturer" "nvidia")
  (list "k8s.amazonaws.com/accelerator")
  (list "karpenter.k8s.aws/instance-gpu-manufacturer" "nvidia")
  (list "eks.amazonaws.com/instance-gpu-manufacturer" "nvidia")
  (list "doks.digitalocean.com/gpu-brand" "nvidia")
}}
{{- $expression := dict "key" (first .) "operator" "Exists" }}
{{- with rest . }}{{ $_ := set $expression "operator" "In" }}{{ $_ := set $expression "values" . }}{{ end }}
{{- $terms = append $terms (dict "matchExpressions" (list $expression)) }}
{{- end }}
{{- $terms | toJson }}
{{- end }}

{{- /* The affinity, without that of values.yaml, or of NVIDIA's chart, where no node-feature-discovery sets its labels. Another one stays. */}}
{{- define "gpu-device-plugin.affinity" -}}
{{- $affinity := .Values.affinity | default dict }}
{{- $ours := include "gpu-device-plugin.gpuLabels" . | fromJsonArray }}
{{- $theirs := list (index $ours 0) (index $ours 3) (index $ours 4) }}
{{- range list $ours $theirs }}
{{- $default := dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" .) }}
{{- if and (include "gpu-device-plugin.withoutNFD" $) (eq (toJson $default) (toJson $affinity.nodeAffinity)) }}
{{- $affinity = omit $affinity "nodeAffinity" }}
{{- end }}
{{- end }}
{{- with $affinity }}{{ toYaml . }}{{ end }}
{{- end }}

{{- /* Whether nothing but the operating system says on which nodes the daemon runs, so that most of them may have no GPU. */}}
{{- define "gpu-device-plugin.everywhere" -}}
{{- $affinity := include "gpu-device-plugin.affinity" . | fromYaml }}
{{- $selector := omit (default dict .Values.nodeSelector) "kubernetes.io/os" "kubernetes.io/arch" }}
{{- $client := and .Values.gpuOperatorClient (not (include "gpu-device-plugin.inPlace" .)) }}
{{- if not (or $affinity.nodeAffinity $selector $client) }}true{{ end }}
{{- end }}

{{- /* The nodeSelector, with labels that the chart needs itself, from a list of: root, these labels. */}}
{{- define "gpu-device-plugin.nodeSelector" -}}
{{- merge dict (last .) (default dict (first .).Values.nodeSelector) (dict "kubernetes.io/os" "linux") | toYaml }}
{{- end }}

{{- /* The new pod serves before the old one stops, unless the values say otherwise. A surge and unavailable pods exclude each other. */}}
{{- define "gpu-device-plugin.updateStrategy" -}}
{{- $type := default "RollingUpdate" (default dict .Values.updateStrategy).type }}
{{- $rolling := default dict (default dict .Values.updateStrategy).rollingUpdate }}
{{- if not (or $rolling.maxSurge $rolling.maxUnavailable) }}{{ $rolling = dict "maxSurge" "10%" "maxUnavailable" 0 }}{{ end }}
{{- if and $rolling.maxSurge (not $rolling.maxUnavailable) }}{{ $rolling = dict "maxSurge" $rolling.maxSurge "maxUnavailable" 0 }}{{ end }}
{{- printf "type: %s" $type }}
{{- if eq $type "RollingUpdate" }}
rollingUpdate:
  {{- toYaml $rolling | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Whether a feature may be on, from a list of: root, words of gpu-device-plugin.features, of which one is enough. */}}
{{- define "gpu-device-plugin.feature" -}}
{{- $on := include "gpu-device-plugin.features" (first .) | fromJsonArray }}
{{- $found := false }}
{{- range rest . }}{{ if has . $on }}{{ $found = true }}{{ end }}{{ end }}
{{- if $found }}true{{ end }}
{{- end }}

{{- /* Whether a feature needs gpu-node-agent, which runs with a service account. */}}
{{- define "gpu-device-plugin.agent" -}}
{{- include "gpu-device-plugin.feature" (list . "labels-nodeFeature" "labels-node" "events" "condition" "taint" "changeTaint" "startupTaint" "quiesce" "nodeConfig" "migLabel" "migEvict" "rollout" "dra" "healthEvents") }}
{{- end }}

{{- /* The root directory of kubelet, which has the same path in the container; empty for the usual one. */}}
{{- define "gpu-device-plugin.kubeletRoot" -}}
{{- $root := .Values.kubeletRoot | trimSuffix "/" }}
{{- if ne $root "/var/lib/kubelet" }}{{ $root }}{{ end }}
{{- end }}

{{- /* The namespace of the Leases that are the slots of the cluster. */}}
{{- define "gpu-device-plugin.slotNamespace" -}}
{{- default (include "gpu-device-plugin.namespace" .) .Values.rollout.namespace }}
{{- end }}

{{- /* The mode of Dynamic Resource Allocation that the daemon is told; empty where a file says it. */}}
{{- define "gpu-device-plugin.draMode" -}}
{{- $dra := .Values.dra }}
{{- $said := .Values.config.name }}
{{- range include "gpu-device-plugin.files" . | fromJsonArray }}
{{- with fromYaml . }}{{ with .dra }}{{ if .mode }}{{ $said = true }}{{ end }}{{ end }}{{ end }}
{{- end }}
{{- if $dra.enabled }}{{ default (ternary "" "dra" (not (empty $said))) $dra.mode }}{{ end }}
{{- end }}

{{- /* The name of the driver that the daemon is told; empty for the usual one. */}}
{{- define "gpu-device-plugin.draDriverName" -}}
{{- if and .Values.dra.enabled (ne .Values.dra.driverName "gpu.nvidia.com") }}{{ .Values.dra.driverName }}{{ end }}
{{- end }}

{{- /* The newest version of the API of Dynamic Resource Allocation that the API server has; empty for none. */}}
{{- define "gpu-device-plugin.resourceVersion" -}}
{{- $version := "" }}
{{- range list "v1beta1" "v1beta2" "v1" }}
{{- if $.Capabilities.APIVersions.Has (printf "resource.k8s.io/%s/DeviceClass" .) }}{{ $version = . }}{{ end }}
{{- end }}
{{- $version }}
{{- end }}

{{- /* The class that the pod of helm test claims devices of; empty where there is no such pod. */}}
{{- define "gpu-device-plugin.testClass" -}}
{{- $mode := include "gpu-device-plugin.draMode" . }}
{{- $class := .Values.test.deviceClass }}
{{- if and (kindIs "invalid" $class) (has $mode (list "dra" "split")) }}{{ $class = .Values.dra.driverName }}{{ end }}
{{- if and .Values.dra.enabled (include "gpu-device-plugin.resourceVersion" .) }}{{ default "" $class }}{{ end }}
{{- end }}

{{- /* Whether a pod of helm test asks for the resource: not where all GPUs are in slices and no class has the resource's name. */}}
{{- define "gpu-device-plugin.testsResource" -}}
{{- $named := and (eq (toString .Values.dra.extendedResourceName) .Values.test.resource) (semverCompare ">=1.36-0" .Capabilities.KubeVersion.Version) }}
{{- if or $named (ne "dra" (include "gpu-device-plugin.draMode" .)) }}true{{ end }}
{{- end }}

{{- define "gpu-device-plugin.testName" -}}
{{- include "gpu-device-plugin.cut" (list 52 (include "gpu-device-plugin.fullname" .)) }}-test
{{- end }}

{{- define "gpu-device-plugin.testMetadata" -}}
namespace: {{ include "gpu-device-plugin.namespace" . | toYaml }}
labels:
  {{- /* Not the selector's: the DaemonSet would take the pod for one of its own. */}}
  app.kubernetes.io/name: {{ include "gpu-device-plugin.cut" (list 58 (include "gpu-device-plugin.name" .)) }}-test
  app.kubernetes.io/instance: {{ .Release.Name | toYaml }}
annotations:
  helm.sh/hook: test
  helm.sh/hook-delete-policy: before-hook-creation
{{- end }}

{{- /* A pod of helm test, up to what its container asks for. */}}
{{- define "gpu-device-plugin.testSpec" -}}
restartPolicy: Never
activeDeadlineSeconds: 120
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ toYaml . }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: test
    image: {{ include "gpu-device-plugin.image" . }}
    {{- with .Values.image.pullPolicy }}
    imagePullPolicy: {{ . }}
    {{- end }}
    args: [check-container, --devices={{ .Values.test.devices }}{{ if .Values.simulate }}, --simulated{{ end }}]
    securityContext:
      runAsNonRoot: true
      runAsUser: 65534
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL]}
      seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "gpu-device-plugin.serviceAccount" -}}
{{- default (include "gpu-device-plugin.fullname" .) .Values.serviceAccount.name }}
{{- end }}

{{- /* The keys of labels that describe GPUs, as a regular expression in CEL. Not those by which others tell the node something,
such as nvidia.com/mig.config. */}}
{{- define "gpu-device-plugin.labelKeys" -}}
{{- $device := "(product|count|replicas|sharing-strategy|memory|multiprocessors|slices[.](gi|ci)|engines[.](copy|decoder|encoder|jpeg|ofa))" }}
{{- $node := "gfd[.]timestamp|cuda[.][a-z.-]+|mig[.](capable|strategy)|mps[.]capable|vgpu[.][a-z-]+" }}
{{- $gpu := printf "gpu[.](present|machine|mode|clique|family|compute[.](major|minor)|%s)|mig-[0-9][0-9a-z.-]*[.]%s" $device $device }}
{{- printf "'^(nvidia[.]com/(%s|%s)|gpu-device-plugin[.]github[.]io/gpu[.](health|link)|feature[.]node[.]kubernetes[.]io/pci-10de[.]present)$'" $node $gpu }}
{{- end }}

{{- /* The tolerations of the values, and those of every taint that gpu-node-agent writes or removes. Such a taint stays on the Node when its writer is
uninstalled, so the pods of each later release tolerate it, whatever their features are. */}}
{{- define "gpu-device-plugin.tolerations" -}}
{{- $tolerations := default list .Values.tolerations }}
{{- range list "gpu-device-plugin.github.io/no-healthy-gpu" "gpu-device-plugin.github.io/fewer-devices" "startup-taint.cluster-autoscaler.kubernetes.io/gpu-device-plugin" }}
{{- $tolerations = append $tolerations (dict "key" . "operator" "Exists") }}
{{- end }}
{{- toYaml $tolerations }}
{{- end }}

{{- /* Whether the container needs CAP_SYS_ADMIN: for MIG devices, to divide GPUs, to take back what work leaves on GPUs, or because NVIDIA's
runtime may be set up to ignore NVIDIA_VISIBLE_DEVICES of containers without it, as for volume-mounts. */}}
{{- define "gpu-device-plugin.admin" -}}
{{- $mounts := contains "volume-mounts" (include "gpu-device-plugin.strategy" .) }}
{{- $mig := or (include "gpu-device-plugin.maySeeMIG" .) (include "gpu-device-plugin.divides" .) }}
{{- if or $mig (contains "reset" (toString .Values.preStartChecks)) $mounts }}true{{ end }}
{{- end }}

{{- /* Whether the daemon answers the labels of NVIDIA's GPU operator in its place: pods with claims cannot end without it. */}}
{{- define "gpu-device-plugin.inPlace" -}}
{{- if and .Values.gpuOperatorClient .Values.dra.enabled }}true{{ end }}
{{- end }}

{{- /* Claims where the labels of the operator would end the pod, or where the pod would not follow the driver. */}}
{{- define "gpu-device-plugin.refuseLeaving" -}}
{{- if .Values.dra.enabled }}
{{- $where := dict "nodeSelector" (default dict .Values.nodeSelector | keys | toJson) "affinity" (default dict .Values.affinity | toJson) }}
{{- range $value, $text := $where }}
{{- with regexFind "nvidia[.]com/gpu[.]deploy[.][A-Za-z0-9_.-]+" $text }}
{{- fail (printf "dra.enabled is true, and %s has the label %s: NVIDIA's tools change such labels while they change the driver or divide GPUs. The pod would end, and pods with claims could not end without it. Remove the label (nvidia.com/gpu.present: \"true\" is on the same nodes) and set gpuOperatorClient: true, with which the daemon stays and releases the driver" $value .) }}
{{- end }}
{{- end }}
{{- end }}
{{- if include "gpu-device-plugin.inPlace" . }}
{{- if eq "false" (toString .Values.features.quiesce) }}
{{- fail "gpuOperatorClient and dra.enabled are true, and features.quiesce is false: with claims the daemon answers the operator by releasing the driver; leave features.quiesce out" }}
{{- end }}
{{- if and .Values.nvidiaDriverRootFolders (ne "/" (include "gpu-device-plugin.driverRoot" .)) }}
{{- fail "gpuOperatorClient and dra.enabled are true, and nvidiaDriverRootFolders is given: the pod would keep these folders of the old driver container after a change of the driver; leave nvidiaDriverRootFolders out" }}
{{- end }}
{{- end }}
{{- end }}

{{- /* gpuOperatorClient where no Node has the label: the pods would vanish. helm template has no Nodes to look at. */}}
{{- define "gpu-device-plugin.refuseClient" -}}
{{- if and .Values.gpuOperatorClient (not (include "gpu-device-plugin.inPlace" .)) }}
{{- $nodes := (lookup "v1" "Node" "" "").items }}
{{- $found := empty $nodes }}
{{- range $nodes }}{{ if hasKey (default dict .metadata.labels) "nvidia.com/gpu.deploy.client" }}{{ $found = true }}{{ end }}{{ end }}
{{- if not $found }}
{{- fail "gpuOperatorClient is true, and no Node has the label nvidia.com/gpu.deploy.client, so no node would have a pod: it is for clusters with NVIDIA's GPU operator" }}
{{- end }}
{{- end }}
{{- end }}

{{- /* runtime: none where another value needs NVIDIA's runtime, where a RuntimeClass nvidia is not this release's, or where a node may not know the
handler runc. helm template has no cluster to look at. */}}
{{- define "gpu-device-plugin.refuseRuntime" -}}
{{- if include "gpu-device-plugin.withoutRuntime" . }}
{{- if regexMatch "envvar|volume-mounts" (include "gpu-device-plugin.strategy" .) }}
{{- fail "runtime is none, and deviceListStrategy has envvar or volume-mounts, which only NVIDIA's runtime understands: leave it out, or set cdi-cri" }}
{{- end }}
{{- range $key, $value := dict "hostDev" .Values.hostDev "cdi.enabled" .Values.cdi.enabled }}
{{- if eq "false" (toString $value) }}{{ fail (printf "runtime is none, and %s is false: without NVIDIA's runtime it is needed; leave it out" $key) }}{{ end }}
{{- end }}
{{- if include "gpu-device-plugin.mps" . }}
{{- fail "runtime is none, and GPUs are shared by MPS: the container of its control daemon gets nvidia-cuda-mps-control from NVIDIA's runtime; leave one of them out" }}
{{- end }}
{{- with lookup "node.k8s.io/v1" "RuntimeClass" "" "nvidia" }}
{{- $by := default dict .metadata.annotations }}
{{- if not (and (eq $.Release.Name (toString (get $by "meta.helm.sh/release-name"))) (eq $.Release.Namespace (toString (get $by "meta.helm.sh/release-namespace")))) }}
{{- fail (printf "runtime is none, and there is a RuntimeClass nvidia with the handler %s, which is not of this release: its handler cannot be changed. Where NVIDIA's GPU operator or toolkit made it, leave runtime out; or set hostDev: true and deviceListStrategy: cdi-cri, which are the same without a RuntimeClass" .handler) }}
{{- end }}
{{- end }}
{{- range (lookup "v1" "Node" "" "").items }}
{{- $labels := default dict .metadata.labels }}
{{- $chosen := ne "windows" (toString (get $labels "kubernetes.io/os")) }}
{{- range $key, $value := default dict $.Values.nodeSelector }}{{ $chosen = and $chosen (eq $value (toString (get $labels $key))) }}{{ end }}
{{- $status := default dict .status }}
{{- $version := dig "nodeInfo" "containerRuntimeVersion" "" $status }}
{{- $handlers := list }}
{{- range $status.runtimeHandlers }}{{ $handlers = append $handlers (toString .name) }}{{ end }}
{{- $known := and (regexMatch "^containerd://v?([2-9]|[1-9][0-9]+)[.]" $version) (or (not $handlers) (has "runc" $handlers)) }}
{{- if and $chosen (not $known) }}
{{- fail (printf "runtime is none, and the Node %s has the runtime %q with the handlers [%s]: only containerd 2.0 and newer is known to have CDI on and the handler runc; set nodeSelector to a label of nodes that have it" .metadata.name $version (join " " (compact $handlers))) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* A DaemonSet that has the name already: one of another release, or one with another selector, which does not change, as that of NVIDIA's
chart with the same fullnameOverride. */}}
{{- define "gpu-device-plugin.refuseSelector" -}}
{{- $namespace := include "gpu-device-plugin.namespace" . }}
{{- $sets := list (list (include "gpu-device-plugin.fullname" .) (include "gpu-device-plugin.selector" .)) }}
{{- if include "gpu-device-plugin.mps" . }}{{ $sets = append $sets (list (include "gpu-device-plugin.mpsName" .) (include "gpu-device-plugin.mpsSelector" .)) }}{{ end }}
{{- if include "gpu-device-plugin.changesDriver" . }}{{ $sets = append $sets (list (include "gpu-device-plugin.driverName" .) (include "gpu-device-plugin.driverSelector" .)) }}{{ end }}
{{- range $sets }}
{{- $name := first . }}
{{- $ours := last . | fromYaml }}
{{- with lookup "apps/v1" "DaemonSet" $namespace $name }}
{{- $release := toString (default "" (get (default dict .metadata.annotations) "meta.helm.sh/release-name")) }}
{{- if not (has $release (list "" $.Release.Name)) }}
{{- fail (printf "the DaemonSet %s/%s is of the release %s: give another fullnameOverride, or upgrade that release" $namespace $name $release) }}
{{- end }}
{{- $theirs := .spec.selector.matchLabels }}
{{- if ne (toJson $theirs) (toJson $ours) }}
{{- fail (printf "the DaemonSet %s/%s is there, and selects pods by other labels, which cannot be changed: keep them by selectorLabelsOverride: %s, or give another fullnameOverride" $namespace $name (toJson $theirs)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* A DeviceClass that is there already, such as that of NVIDIA's driver. helm template has no cluster to look at. */}}
{{- define "gpu-device-plugin.refuseClasses" -}}
{{- $version := include "gpu-device-plugin.resourceVersion" . }}
{{- if and .Values.dra.enabled $version }}
{{- $names := dict }}
{{- if .Values.dra.deviceClasses }}
{{- range list .Values.dra.driverName (printf "mig.%s" (trimPrefix "gpu." .Values.dra.driverName)) }}{{ $_ := set $names . "set dra.deviceClasses to false to leave it as it is, or dra.driverName to another name" }}{{ end }}
{{- end }}
{{- range .Values.dra.classes }}{{ $_ := set $names .name "leave it out of dra.classes, or give it another name" }}{{ end }}
{{- range $name, $remedy := $names }}
{{- with lookup (printf "resource.k8s.io/%s" $version) "DeviceClass" "" $name }}
{{- $by := default dict .metadata.annotations }}
{{- if not (and (eq $.Release.Name (toString (get $by "meta.helm.sh/release-name"))) (eq $.Release.Namespace (toString (get $by "meta.helm.sh/release-namespace")))) }}
{{- fail (printf "there is a DeviceClass %s, which is not of this release: %s" $name $remedy) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Whether gpu-driver changes the driver of the nodes. */}}
{{- define "gpu-device-plugin.changesDriver" -}}
{{- if or (default dict .Values.driver).images (default dict .Values.driver).downloadFrom }}true{{ end }}
{{- end }}

{{- /* The node's directory with a folder for each driver, as package driverapi has it. */}}
{{- define "gpu-device-plugin.driverDirectory" -}}
/var/lib/gpu-device-plugin/driver
{{- end }}

{{- /* Whether the drivers' images are volumes, a stable feature of Kubernetes since 1.36. */}}
{{- define "gpu-device-plugin.imageVolumes" -}}
{{- $on := semverCompare ">=1.36-0" .Capabilities.KubeVersion.Version }}
{{- if not (kindIs "invalid" .Values.driver.imageVolumes) }}{{ $on = .Values.driver.imageVolumes }}{{ end }}
{{- if $on }}true{{ end }}
{{- end }}

{{- define "gpu-device-plugin.driverName" -}}
{{- include "gpu-device-plugin.cut" (list 55 (include "gpu-device-plugin.fullname" .)) }}-driver
{{- end }}

{{- /* Another name, so that no DaemonSet selects the pods of another. */}}
{{- define "gpu-device-plugin.driverSelector" -}}
app.kubernetes.io/name: {{ include "gpu-device-plugin.cut" (list 55 (include "gpu-device-plugin.name" .)) }}-driver
app.kubernetes.io/instance: {{ .Release.Name | toYaml }}
{{- if (default dict .Values.componentSelectorLabels).enabled }}
app.kubernetes.io/component: driver
{{- end }}
{{- end }}

{{- /* Values that need slots of the cluster where there are none: the daemon would end at its start. What the file of config.name and extraArgs
say is not known here. */}}
{{- define "gpu-device-plugin.refuseWithoutSlots" -}}
{{- $asked := list .Values.rollout.slots }}
{{- if kindIs "invalid" .Values.rollout.slots }}
{{- range include "gpu-device-plugin.files" . | fromJsonArray }}
{{- with fromYaml . }}{{ with .rollout }}{{ $asked = append $asked .slots }}{{ end }}{{ end }}
{{- end }}
{{- end }}
{{- $slots := false }}
{{- range $asked }}{{ if not (has (toString .) (list "<nil>" "0" "")) }}{{ $slots = true }}{{ end }}{{ end }}
{{- if not (or $slots .Values.config.name .Values.extraArgs .Values.extraEnvs) }}
{{- $budget := and (eq "true" (toString .Values.mig.enabled)) (eq "true" (toString .Values.mig.budget)) }}
{{- range $value, $wanted := dict "repair" (has (toString .Values.repair) (list "idle" "evict")) "driver.version" .Values.driver.version "mig.budget" $budget }}
{{- if $wanted }}{{ fail (printf "%s is given, and the cluster has no slots, so that no node could begin: set rollout.slots" $value) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Drivers beside values with which no driver could ever be changed. */}}
{{- define "gpu-device-plugin.refuseDriver" -}}
{{- if include "gpu-device-plugin.changesDriver" . }}
{{- if include "gpu-device-plugin.mps" . }}
{{- fail "driver.images or driver.downloadFrom is given, and GPUs are shared by MPS: its control daemons use the driver all the time, so that it could never be changed; leave one of them out" }}
{{- end }}
{{- if .Values.nvidiaDriverRootFolders }}
{{- fail "driver.images or driver.downloadFrom is given, and nvidiaDriverRootFolders: the pod would keep these folders of the driver with which it started; leave nvidiaDriverRootFolders out" }}
{{- end }}
{{- if .Values.gpuOperatorClient }}
{{- fail "driver.images or driver.downloadFrom is given, and gpuOperatorClient is true: NVIDIA's GPU operator changes the driver of its nodes itself; leave one of them out" }}
{{- end }}
{{- else if .Values.driver.moduleParameters }}
{{- fail "driver.moduleParameters is given without driver.images or driver.downloadFrom: only gpu-driver loads modules with them, and it does not run; set one of them, or write the parameters to /etc/modprobe.d of the nodes" }}
{{- end }}
{{- end }}

{{- define "gpu-device-plugin.mpsName" -}}
{{- include "gpu-device-plugin.cut" (list 44 (include "gpu-device-plugin.fullname" .)) }}-mps-control-daemon
{{- end }}

{{- /* Names that Kubernetes would not take. */}}
{{- define "gpu-device-plugin.refuseNames" -}}
{{- range list
  (list "fullnameOverride" (include "gpu-device-plugin.fullname" .))
  (list "serviceAccount.name" (include "gpu-device-plugin.serviceAccount" .))
  (list "config.name" .Values.config.name)
  (list "mig.config.name" .Values.mig.config.name)
  (list "priorityClassName" .Values.priorityClassName)
  (list "runtimeClassName" .Values.runtimeClassName)
  (list "openshiftSCC" .Values.openshiftSCC)
}}
{{- $name := default "" (last .) }}
{{- if and $name (or (gt (len $name) 253) (not (regexMatch "^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$" $name))) }}
{{- fail (printf "%q is no name of a Kubernetes object, which has lower-case letters, digits, - and . alone, 253 characters at most: set %s" $name (first .)) }}
{{- end }}
{{- end }}
{{- $namespace := include "gpu-device-plugin.namespace" . }}
{{- if not (regexMatch "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$" $namespace) }}
{{- fail (printf "%q is no name of a namespace, which has lower-case letters, digits and - alone, 63 characters at most: set namespaceOverride" $namespace) }}
{{- end }}
{{- if not (regexMatch "^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$" (include "gpu-device-plugin.name" .)) }}
{{- fail (printf "%q is no value of a label, which has letters, digits, -, _ and . alone, and begins and ends with a letter or a digit: set nameOverride" (include "gpu-device-plugin.name" .)) }}
{{- end }}
{{- if eq "/" (dir (toString (default "/x/y" .Values.rebootFile))) }}
{{- fail (printf "rebootFile is %s, and the pod would get the node's / with write access: name a file in a folder, such as /var/run/reboot-required" .Values.rebootFile) }}
{{- end }}
{{- end }}

{{- /* A security context of one's own that leaves the container without what other values need. */}}
{{- define "gpu-device-plugin.refuseContext" -}}
{{- $own := default dict .Values.securityContext }}
{{- $pod := default dict .Values.podSecurityContext }}
{{- if not (or (kindIs "invalid" $own.capabilities) (kindIs "map" $own.capabilities)) }}
{{- fail "securityContext.capabilities must be a mapping, such as {drop: [ALL], add: [SYS_ADMIN]}" }}
{{- end }}
{{- $added := default list (default dict $own.capabilities).add }}
{{- if and $own (not $own.privileged) (not (has "ALL" $added)) }}
{{- if and (include "gpu-device-plugin.admin" .) (not (has "SYS_ADMIN" $added)) }}
{{- fail "securityContext has no capability SYS_ADMIN, which migStrategy, mig, dra.dynamicMIG, preStartChecks with a reset and volume-mounts need: add capabilities: {add: [SYS_ADMIN]}. Where config.name is set, migStrategy: none and mig.enabled: false say that its files have no MIG" }}
{{- end }}
{{- if and .Values.kernelLog (not (has "SYSLOG" $added)) }}
{{- fail "securityContext has no capability SYSLOG, which kernelLog needs: add capabilities: {add: [SYSLOG]}" }}
{{- end }}
{{- if and (include "gpu-device-plugin.feature" (list . "migPause")) (not (has "SYS_PTRACE" $added)) }}
{{- fail "securityContext has no capability SYS_PTRACE, which mig.disruption: pause needs: add capabilities: {add: [SYS_PTRACE]}" }}
{{- end }}
{{- end }}
{{- $privileged := or .Values.compatWithCPUManager (include "gpu-device-plugin.hostDev" .) }}
{{- range $key := list "runAsUser" "runAsNonRoot" }}
{{- $said := index $own $key }}
{{- if kindIs "invalid" $said }}{{ $said = index $pod $key }}{{ if and (eq $key "runAsUser") (not $own) (not $privileged) }}{{ $said = 0 }}{{ end }}{{ end }}
{{- if and (index $pod $key) (include "gpu-device-plugin.mps" $) }}
{{- fail (printf "podSecurityContext has %s: %v, and the MPS control daemon runs as root: leave it out" $key (index $pod $key)) }}
{{- end }}
{{- if $said }}
{{- fail (printf "securityContext or podSecurityContext has %s: %v, and kubelet's folders and sockets belong to root: set securityContext.%s to %s" $key $said $key (ternary "0" "false" (eq $key "runAsUser"))) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Variables of devicePlugin.containers.main.env, a list of JSON. */}}
{{- define "gpu-device-plugin.ownEnv" -}}
{{- $containers := default dict (default dict .Values.devicePlugin).containers }}
{{- default list (default dict $containers.main).env | toJson }}
{{- end }}

{{- /* What variables of one's own and extraArgs say, a list of JSON: the variable, its value, and the words for both. A flag has the name of its
variable in other letters; without a value it says true, or what the next argument is. */}}
{{- define "gpu-device-plugin.asked" -}}
{{- $asked := list }}
{{- range include "gpu-device-plugin.ownEnv" . | fromJsonArray }}
{{- $known := not (or .valueFrom (contains "$(" (toString .value))) }}
{{- $value := ternary (toString (default "" .value)) "unknown" $known }}
{{- $words := ternary (printf "%s=%s" .name $value) (printf "%s with a value that the chart cannot read" .name) $known }}
{{- $asked = append $asked (dict "name" .name "value" $value "words" (printf "devicePlugin.containers.main.env has %s" $words)) }}
{{- end }}
{{- $args := default list .Values.extraArgs }}
{{- $variables := dict "NVIDIA_DRIVER_ROOT" "DRIVER_ROOT" "CONFIG_FILE_SRCDIR" "NODE_CONFIG_DIR" }}
{{- range $i, $arg := $args }}
{{- if hasPrefix "--" $arg }}
{{- $said := splitn "=" 2 (trimPrefix "--" $arg) }}
{{- $name := $said._0 | replace "-" "_" | upper }}
{{- range $variable, $flag := $variables }}{{ if eq $flag $name }}{{ $name = $variable }}{{ end }}{{ end }}
{{- $next := last (slice (concat $args (list "--")) 0 (add $i 2 | int)) }}
{{- $value := $said._1 }}
{{- if not (contains "=" $arg) }}{{ $value = ternary "true" $next (hasPrefix "-" $next) }}{{ end }}
{{- $asked = append $asked (dict "name" $name "value" $value "words" (printf "extraArgs has %s" (ternary $arg (printf "%s %s" $arg $value) (contains "=" $arg)))) }}
{{- end }}
{{- end }}
{{- $asked | toJson }}
{{- end }}

{{- /* A variable of devicePlugin.containers.main.env, or an argument of extraArgs, that asks for what the pod has no right to. Each row has the
variable, the value that grants it, a pattern of what needs that, and whether the pod has it. */}}
{{- define "gpu-device-plugin.refuseUngranted" -}}
{{- $asked := include "gpu-device-plugin.asked" . | fromJsonArray }}
{{- if $asked }}
{{- $hostDev := include "gpu-device-plugin.hostDev" . }}
{{- $own := default dict .Values.securityContext }}
{{- $admin := include "gpu-device-plugin.admin" . }}
{{- $privileged := or $own.privileged .Values.compatWithCPUManager $hostDev }}
{{- $checks := toString .Values.preStartChecks }}
{{- $true := "^(1|t|T|true|True|TRUE)$" }}
{{- $on := dict }}
{{- range include "gpu-device-plugin.features" . | fromJsonArray }}{{ $_ := set $on . true }}{{ end }}
{{- $root := include "gpu-device-plugin.driverRoot" . | trimSuffix "/" }}
{{- $kubelet := .Values.kubeletRoot | trimSuffix "/" }}
{{- $port := ternary (printf ":%v$" .Values.metrics.port) "" (ne "" (include "gpu-device-plugin.port" .)) }}
{{- range $row := list
  (list "DEVICE_LIST_STRATEGY" "deviceListStrategy or cdi.enabled" "cdi" (include "gpu-device-plugin.cdi" .))
  (list "DEVICE_LIST_STRATEGY" "deviceListStrategy" "volume-mounts" (or $admin $privileged))
  (list "MIG_STRATEGY" "migStrategy" "single|mixed" (or $admin $privileged))
  (list "PRE_START_CHECKS" "preStartChecks" "clean" (or .Values.hostPID (regexMatch "clean|reset" $checks)))
  (list "PRE_START_CHECKS" "preStartChecks" "reset" (contains "reset" $checks))
  (list "KERNEL_LOG" "kernelLog" $true (or .Values.kernelLog $hostDev))
  (list "REBOOT_FILE" "rebootFile" "/" .Values.rebootFile)
  (list "MIG_ENABLED" "mig.enabled" $true (include "gpu-device-plugin.says" (list . "mig" "enabled")))
  (list "MIG_LABEL" "mig.enabled and mig.label" $true $on.migLabel)
  (list "MIG_DISRUPTION" "mig.enabled and mig.disruption" "evict|pause" $on.migEvict)
  (list "MIG_DISRUPTION" "mig.enabled and mig.disruption" "pause" $on.migPause)
  (list "MIG_BUDGET" "mig.enabled and mig.budget" $true $on.rollout)
  (list "REPAIR" "repair" "plan|idle|evict" $on.rollout)
  (list "REPAIR" "repair" "idle|evict" (include "gpu-device-plugin.repairs" (list . "idle" "evict")))
  (list "REPAIR" "repair" "evict" $on.repairEvict)
  (list "DRIVER_VERSION" "driver.version" "." (include "gpu-device-plugin.wantsDriver" .))
  (list "DRIVER_PODS" "driver.pods" "evict" $on.driverEvict)
  (list "ROLLOUT_NAMESPACE" "rollout.namespace" "." .Values.rollout.namespace)
  (list "NODE_LABELS" "features.labels" "^file$" (get $on "labels-file"))
  (list "NODE_LABELS" "features.labels" "^nodeFeature$" (get $on "labels-nodeFeature"))
  (list "NODE_LABELS" "features.labels" "^node$" (get $on "labels-node"))
  (list "NODE_EVENTS" "features.events" $true $on.events)
  (list "NODE_EVENTS" "features.events" "pods" $on.podEvents)
  (list "NODE_CONDITION" "features.condition" $true $on.condition)
  (list "NODE_CONDITION_TYPES" "features.conditionTypes" "." .Values.features.conditionTypes)
  (list "NODE_TAINT" "features.taint" $true $on.taint)
  (list "NODE_CHANGE_TAINT" "features.changeTaint" $true $on.changeTaint)
  (list "NODE_STARTUP_TAINT" "features.startupTaint" $true $on.startupTaint)
  (list "NODE_QUIESCE" "features.quiesce" $true $on.quiesce)
  (list "HEALTH_EVENTS" "features.healthEvents" "." .Values.features.healthEvents)
  (list "CONFIG_FILE_SRCDIR" "features.nodeConfig" "/" $on.nodeConfig)
  (list "DRA_MODE" "dra.enabled" "dra|split" $on.dra)
  (list "DRA_DYNAMIC_MIG" "dra.enabled and dra.dynamicMIG" $true (include "gpu-device-plugin.divides" .))
  (list "DRA_CLAIM_STATUS" "dra.enabled and dra.claimStatus" $true (and $on.dra (include "gpu-device-plugin.says" (list . "dra" "claimStatus"))))
  (list "DRA_DRIVER_NAME" "dra.driverName" "." false)
  (list "NVIDIA_DRIVER_ROOT" "nvidiaDriverRoot" "." false (printf "^%s/?$" (regexQuoteMeta $root)))
  (list "KUBELET_ROOT" "kubeletRoot" "." false (printf "^%s/?$" (regexQuoteMeta $kubelet)))
  (list "METRICS_ADDRESS" "metrics.listen" "^(|127[.].*|localhost:.*|\\[::1\\].*)$" (not $port))
  (list "METRICS_ADDRESS" "metrics.port" "." (not $port) $port)
}}
{{- $pattern := index $row 2 }}
{{- if not (index $row 3) }}
{{- range $asked }}
{{- $same := false }}
{{- if gt (len $row) 4 }}{{ $same = regexMatch (last $row) .value }}{{ end }}
{{- if and (eq .name (first $row)) (not $same) (or (eq .value "unknown") (regexMatch $pattern .value)) }}
{{- $lacks := ternary "to which the pod's mounts and probes do not go" "for which the pod has no rights" (has .name (list "NVIDIA_DRIVER_ROOT" "KUBELET_ROOT" "METRICS_ADDRESS")) }}
{{- fail (printf "%s, %s: set %s" .words $lacks (index $row 1)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* What the files of config.map that may count ask for, as JSON: file -> {granted: [KEY], refused: {KEY: VALUE}}. For refused the pod has no
rights, which VALUE would give it. A value of the chart counts before the file. Each row has the key of the file, the value of the chart, a
pattern of what needs rights, whether the pod has them, and the value that gives them. */}}
{{- define "gpu-device-plugin.fileAsks" -}}
{{- $own := default dict .Values.securityContext }}
{{- $hostDev := include "gpu-device-plugin.hostDev" . }}
{{- $admin := or (include "gpu-device-plugin.admin" .) $own.privileged .Values.compatWithCPUManager $hostDev }}
{{- $rows := list
  (list "flags.migStrategy" .Values.migStrategy "single|mixed" true "migStrategy")
  (list "flags.nvidiaDriverRoot" .Values.nvidiaDriverRoot "/" true "nvidiaDriverRoot")
  (list "flags.plugin.deviceListStrategy" (include "gpu-device-plugin.strategy" .) "cdi" (include "gpu-device-plugin.cdi" .) "cdi.enabled")
  (list "flags.plugin.deviceListStrategy" (include "gpu-device-plugin.strategy" .) "volume-mounts" $admin "deviceListStrategy")
  (list "flags.plugin.preStartChecks" .Values.preStartChecks "clean" .Values.hostPID "preStartChecks, or hostPID")
  (list "flags.plugin.preStartChecks" .Values.preStartChecks "reset" (and .Values.hostPID $admin) "preStartChecks")
  (list "health.kernelLog" .Values.kernelLog "true" $hostDev "kernelLog")
  (list "health.rebootFile" .Values.rebootFile "/" false "rebootFile")
  (list "health.repair" .Values.repair "plan|idle|evict" true "repair")
  (list "driver.version" .Values.driver.version "." true "driver.version")
  (list "driver.pods" .Values.driver.pods "evict" true "driver.pods")
  (list "features.labels" (include "gpu-device-plugin.labelsValue" . | fromJson).labels "file|node" true "features.labels")
  (list "features.conditionTypes" .Values.features.conditionTypes "." false "features.conditionTypes")
  (list "features.healthEvents" .Values.features.healthEvents "." false "features.healthEvents")
  (list "sharing.mps" .Values.mps.enabled "." (include "gpu-device-plugin.mps" .) "mps.enabled")
  (list "mig.enabled" .Values.mig.enabled "true" true "mig.enabled")
  (list "mig.disruption" .Values.mig.disruption "evict|pause" true "mig.disruption")
  (list "mig.budget" .Values.mig.budget "true" true "mig.budget")
  (list "dra.mode" .Values.dra.mode "dra|split" .Values.dra.enabled "dra.enabled")
  (list "dra.driverName" (include "gpu-device-plugin.draDriverName" .) "." false "dra.driverName")
}}
{{- range list "events" "condition" "taint" "changeTaint" "startupTaint" "quiesce" }}
{{- $rows = append $rows (list (printf "features.%s" .) (get $.Values.features .) "true|pods" true (printf "features.%s" .)) }}
{{- end }}
{{- $chooses := include "gpu-device-plugin.nodeConfig" . }}
{{- $file := include "gpu-device-plugin.configFile" . }}
{{- $all := dict }}
{{- range $name, $text := .Values.config.map }}
{{- if or $chooses (eq $name $file) }}
{{- $granted := list }}
{{- $refused := dict }}
{{- range $row := $rows }}
{{- $at := fromYaml $text }}
{{- range splitList "." (first $row) }}{{ if kindIs "map" $at }}{{ $at = get $at . }}{{ else }}{{ $at = "" }}{{ end }}{{ end }}
{{- if and (has (toString (index $row 1)) (list "" "[]" "<nil>")) (regexMatch (index $row 2) (toString (default "" $at))) }}
{{- if index $row 3 }}{{ $granted = append $granted (first $row) }}{{ else }}{{ $_ := set $refused (first $row) (last $row) }}{{ end }}
{{- end }}
{{- end }}
{{- $_ := set $all $name (dict "granted" (uniq $granted) "refused" $refused) }}
{{- end }}
{{- end }}
{{- $all | toJson }}
{{- end }}

{{- /* The folders of the driver root that the pod has, below that and below its place in the container: the root itself, or those of
nvidiaDriverRootFolders. A JSON list. */}}
{{- define "gpu-device-plugin.driverFolders" -}}
{{- default (list "") .Values.nvidiaDriverRootFolders | toJson }}
{{- end }}

{{- /* The folder above the driver root of a driver container or of the drivers' folders, which the pod has where it stays while the driver changes:
a mount of the root itself would keep the old driver's files. Empty where the pod has the root itself. */}}
{{- define "gpu-device-plugin.driverParent" -}}
{{- $root := include "gpu-device-plugin.driverRoot" . | trimSuffix "/" }}
{{- if and (or (include "gpu-device-plugin.inPlace" .) (include "gpu-device-plugin.changesDriver" .)) $root }}{{ dir $root }}{{ end }}
{{- end }}

{{- /* Values that ask for what this chart does not do: better refused than passed over. */}}
{{- define "gpu-device-plugin.refuse" -}}
{{- if eq "false" (toString .Values.devicePlugin.enabled) }}
{{- fail "devicePlugin.enabled is false, and this chart is the device plugin: do not install it. Labels alone come from the program gpu-feature-discovery of the image" }}
{{- end }}
{{- if .Values.nfd.enabled }}
{{- fail "nfd.enabled: node-feature-discovery is no part of this chart. Install its own chart and set nfd.enabled to false, or leave nfd.enabled out and set gfd.enabled: the daemon labels its node itself" }}
{{- end }}
{{- if and (eq "default" (include "gpu-device-plugin.namespace" .)) (not .Values.allowDefaultNamespace) }}
{{- fail "the namespace is default: give another one with --namespace, or set allowDefaultNamespace to true" }}
{{- end }}
{{- include "gpu-device-plugin.refuseNames" . }}
{{- include "gpu-device-plugin.refuseDriver" . }}
{{- include "gpu-device-plugin.refuseWithoutSlots" . }}
{{- if eq "tegra" (default "" .Values.deviceDiscoveryStrategy) }}
{{- fail "deviceDiscoveryStrategy is tegra: Jetson has no NVML devices that could be watched, and is not supported" }}
{{- end }}
{{- if and .Values.dra.enabled (semverCompare "<1.34-0" .Capabilities.KubeVersion.Version) }}
{{- fail (printf "dra.enabled is true, and Kubernetes is %s: ResourceClaims need 1.34 or newer; upgrade the cluster, leave dra.enabled out, or give helm template the version of the cluster with --kube-version" .Capabilities.KubeVersion.Version) }}
{{- end }}
{{- if and .Values.dra.mode (not .Values.dra.enabled) }}
{{- fail "dra.mode is given, and dra.enabled is not true" }}
{{- end }}
{{- if and .Values.dra.dynamicMIG (not .Values.dra.enabled) }}
{{- fail "dra.dynamicMIG is given, and dra.enabled is not true" }}
{{- end }}
{{- if and .Values.dra.switchMIG (ne .Values.dra.dynamicMIG true) }}
{{- fail "dra.switchMIG is given, and dra.dynamicMIG is not true" }}
{{- end }}
{{- include "gpu-device-plugin.refuseLeaving" . }}
{{- include "gpu-device-plugin.refuseClient" . }}
{{- include "gpu-device-plugin.refuseRuntime" . }}
{{- include "gpu-device-plugin.refuseSelector" . }}
{{- include "gpu-device-plugin.refuseClasses" . }}
{{- include "gpu-device-plugin.refuseContext" . }}
{{- include "gpu-device-plugin.refuseUngranted" . }}
{{- with .Values.features.healthEvents }}
{{- if has (trimPrefix "unix://" . | dir) (list "/" "/run" "/var/run" "/var" "/tmp") }}
{{- fail (printf "features.healthEvents is %s: the pod mounts the folder of the socket, which must be a folder of its own, such as /var/run/nvsentinel" .) }}
{{- end }}
{{- end }}
{{- if .Values.features.nodeConfig }}
{{- if not (or .Values.config.map .Values.config.name) }}
{{- fail "features.nodeConfig: a label of the node chooses one of the files of config.map or config.name, and neither is given" }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The account of the MPS control daemon where the label of the node chooses its file: one that reads nodes, and no more. An account that is
there already is that of all pods. */}}
{{- define "gpu-device-plugin.mpsAccount" -}}
{{- include "gpu-device-plugin.serviceAccount" . }}{{ if .Values.serviceAccount.create }}-mps{{ end }}
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
{{- $shared := .Values.devicePlugin.enableHostNetwork }}{{- /* the port would be one of the node, and stop the surge */}}
{{- if and .Values.metrics.enabled (ne .Values.metrics.listen "loopback") (not $shared) }}true{{ end }}
{{- end }}

{{- /* A probe, from a list of: root, the value, a path for a port that is open, and otherwise a command. */}}
{{- define "gpu-device-plugin.probe" -}}
{{- $probe := index . 1 }}
{{- if not (or $probe.exec $probe.httpGet $probe.tcpSocket $probe.grpc) }}
{{- if include "gpu-device-plugin.port" (first .) }}
httpGet: {path: {{ index . 2 | quote }}, port: metrics}
{{- else }}
exec: {command: [gpu-device-plugin, {{ slice . 3 | join ", " }}]}
{{- end }}
{{- end }}
{{ toYaml $probe }}
{{- end }}

{{- /* The variables of the daemon's container, a YAML list. */}}
{{- define "gpu-device-plugin.env" -}}
{{- $fail := .Values.failOnInitError }}
{{- $few := or (include "gpu-device-plugin.withoutNFD" .) (include "gpu-device-plugin.everywhere" .) }}{{- /* of the nodes have GPUs */}}
{{- if and (kindIs "invalid" $fail) $few }}{{ $fail = false }}{{ end }}
{{- $without := ternary .Values.noTimestamp .Values.gfd.noTimestamp (kindIs "invalid" .Values.gfd.noTimestamp) }}
{{- $timestamp := ternary nil (not $without) (kindIs "invalid" $without) }}
{{- range list
  (list "COMPATIBILITY" .Values.compatibility)
  (list "MIG_STRATEGY" .Values.migStrategy)
  (list "FAIL_ON_INIT_ERROR" $fail)
  (list "DEVICE_LIST_STRATEGY" (include "gpu-device-plugin.strategy" .))
  (list "DEVICE_ID_STRATEGY" .Values.deviceIDStrategy)
  (list "DEVICE_DISCOVERY_STRATEGY" .Values.deviceDiscoveryStrategy)
  (list "SHARED_DEVICES_ALLOCATION_POLICY" .Values.sharedDevicesAllocationPolicy)
  (list "KERNEL_LOG" .Values.kernelLog)
  (list "HEALTH_INTERVAL" .Values.healthInterval)
  (list "DRIVER_AT_LEAST" .Values.driver.atLeast)
  (list "DRIVER_BELOW" .Values.driver.below)
  (list "DRIVER_VERSION" .Values.driver.version)
  (list "DRIVER_SOURCE" .Values.driver.source)
  (list "DRIVER_SHA256" .Values.driver.sha256)
  (list "DRIVER_PODS" .Values.driver.pods)
  (list "VALIDATE" .Values.validate)
  (list "REBOOT_FILE" (ternary "" (printf "/reboot/%s" (base (toString .Values.rebootFile))) (empty .Values.rebootFile)))
  (list "REPAIR" (ternary "off" .Values.repair (eq "false" (toString .Values.repair))))
  (list "LOGGING_FORMAT" .Values.loggingFormat)
  (list "PRE_START_CHECKS" .Values.preStartChecks)
  (list "NVIDIA_DRIVER_ROOT" (default (ternary (include "gpu-device-plugin.driverRoot" .) "" (ne "" (include "gpu-device-plugin.changesDriver" .))) .Values.nvidiaDriverRoot))
  (list "DRIVER_ROOT_CTR_PATH" (ternary "" (printf "/driver-root/%s" (include "gpu-device-plugin.driverRoot" . | base)) (empty (include "gpu-device-plugin.driverParent" .))))
  (list "NVIDIA_DEV_ROOT" .Values.nvidiaDevRoot)
  (list "LIBRARY_SEARCH_PATH" .Values.librarySearchPath)
  (list "NVIDIA_DRIVER_CAPABILITIES" .Values.nvidiaDriverCapabilities)
  (list "PASS_DEVICE_SPECS" .Values.compatWithCPUManager)
  (list "GDRCOPY_ENABLED" .Values.gdrcopyEnabled)
  (list "GDS_ENABLED" .Values.gdsEnabled)
  (list "MOFED_ENABLED" .Values.mofedEnabled)
  (list "NVIDIA_CDI_HOOK_PATH" .Values.cdi.nvidiaHookPath)
  (list "CDI_FEATURE_FLAGS" .Values.cdi.featureFlags)
  (list "SIMULATE" .Values.simulate)
  (list "NODE_LABELS" (include "gpu-device-plugin.labelsValue" . | fromJson).labels)
  (list "NODE_LABELS_TIMESTAMP" $timestamp)
  (list "NODE_EVENTS" .Values.features.events)
  (list "NODE_CONDITION" .Values.features.condition)
  (list "NODE_CONDITION_TYPES" .Values.features.conditionTypes)
  (list "NODE_TAINT" .Values.features.taint)
  (list "NODE_CHANGE_TAINT" .Values.features.changeTaint)
  (list "NODE_STARTUP_TAINT" .Values.features.startupTaint)
  (list "NODE_QUIESCE" (ternary true .Values.features.quiesce (not (empty (include "gpu-device-plugin.inPlace" .)))))
  (list "HEALTH_EVENTS" .Values.features.healthEvents)
  (list "HEALTH_EVENTS_STRATEGY" .Values.features.healthEventsStrategy)
  (list "HEALTH_EVENTS_MACHINE" .Values.features.healthEventsMachine)
  (list "MIG_ENABLED" .Values.mig.enabled)
  (list "MIG_LAYOUT" .Values.mig.layout)
  (list "MIG_CONFIG_FILE" (ternary nil (printf "/mig/%s" .Values.mig.config.key) (empty .Values.mig.config.name)))
  (list "MIG_LABEL" .Values.mig.label)
  (list "MIG_REPLACE" .Values.mig.replace)
  (list "MIG_RESET_IN_VM" .Values.mig.resetInVM)
  (list "MIG_DISRUPTION" .Values.mig.disruption)
  (list "MIG_EVICT_TIMEOUT" .Values.mig.evictTimeout)
  (list "MIG_BUDGET" .Values.mig.budget)
  (list "ROLLOUT_SLOTS" .Values.rollout.slots)
  (list "ROLLOUT_NAMESPACE" (ternary (include "gpu-device-plugin.slotNamespace" .) nil (not (empty (include "gpu-device-plugin.feature" (list . "rollout"))))))
  (list "ROLLOUT_WAVE_LABEL" .Values.rollout.waveLabel)
  (list "ROLLOUT_WAVE_SOAK" .Values.rollout.waveSoak)
  (list "ROLLOUT_TOPOLOGY_LABEL" .Values.rollout.topologyLabel)
  (list "ROLLOUT_WINDOWS" .Values.rollout.windows)
  (list "DRA_MODE" (include "gpu-device-plugin.draMode" .))
  (list "DRA_DRIVER_NAME" (include "gpu-device-plugin.draDriverName" .))
  (list "DRA_SHARES" .Values.dra.shares)
  (list "DRA_SHARE_BY" .Values.dra.shareBy)
  (list "DRA_CLAIM_STATUS" .Values.dra.claimStatus)
  (list "DRA_METADATA" .Values.dra.metadata)
  (list "DRA_DYNAMIC_MIG" .Values.dra.dynamicMIG)
  (list "DRA_SWITCH_MIG" .Values.dra.switchMIG)
  (list "KUBELET_ROOT" (include "gpu-device-plugin.kubeletRoot" .))
}}
{{- if not (has (toString (last .)) (list "" "[]" "<nil>")) }}
- {name: {{ first . }}, value: {{ ternary (last . | join ",") (last . | toString) (kindIs "slice" (last .)) | quote }}}
{{- end }}
{{- end }}
{{- if .Values.metrics.enabled }}
{{- if eq .Values.metrics.listen "pod" }}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
{{- end }}
- {name: METRICS_ADDRESS, value: {{ include "gpu-device-plugin.metricsAddress" . | quote }}}
{{- range list
  (list "GPU_METRICS" .Values.metrics.gpu)
  (list "GPU_METRICS_INTERVAL" .Values.metrics.gpuInterval)
  (list "GPU_METRICS_PCIE_THROUGHPUT" .Values.metrics.pcieThroughput)
  (list "GPU_METRICS_HOSTNAME_LABEL" .Values.metrics.hostnameLabel)
  (list "GPU_METRICS_POD_UID" .Values.metrics.podUID)
}}
{{- if not (has (toString (last .)) (list "" "[]" "<nil>")) }}
- {name: {{ first . }}, value: {{ last . | toString | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- if or .Values.metrics.enabled (include "gpu-device-plugin.agent" .) }}
- {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
{{- end }}
{{- if include "gpu-device-plugin.feature" (list . "labels-nodeFeature") }}
- {name: NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
{{- end }}
- {name: CONTAINER_DRIVER_ROOT, value: /driver-root}
- {name: MPS_ROOT, value: {{ .Values.mps.root | quote }}}
{{- $changes := include "gpu-device-plugin.divides" . }}
{{- if include "gpu-device-plugin.hostDev" . }}
- {name: NVIDIA_VISIBLE_DEVICES, value: void}
{{- else }}
{{- if or $changes (include "gpu-device-plugin.maySeeMIG" .) }}
- {name: NVIDIA_MIG_MONITOR_DEVICES, value: all}
{{- end }}
{{- if $changes }}
- {name: NVIDIA_MIG_CONFIG_DEVICES, value: all}
{{- end }}
{{- end }}
{{- include "gpu-device-plugin.configEnv" . }}
{{- end }}

{{- /* Whether the API server has ValidatingAdmissionPolicies. */}}
{{- define "gpu-device-plugin.validates" -}}
{{- $enabled := .Values.admissionPolicy.enabled }}
{{- if kindIs "invalid" $enabled }}{{ $enabled = semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version }}{{ end }}
{{- if $enabled }}true{{ end }}
{{- end }}

{{- /* What pods ask for where GPUs are in units of memory, as JSON: whether there are any (on), the resources of memory and of percentages,
and for pods with HAMi's words (hami) the only ones and the size in MiB. A value of the chart counts before the files. */}}
{{- define "gpu-device-plugin.units" -}}
{{- $values := .Values.units }}
{{- $on := $values.enabled }}
{{- $pairs := dict }}
{{- $blocks := list }}
{{- range include "gpu-device-plugin.files" . | fromJsonArray }}
{{- $file := default dict (fromYaml .) }}
{{- $selected := false }}
{{- range $file.selectors }}{{ $selected = or $selected .units }}{{ end }}
{{- if $selected }}
{{- if kindIs "invalid" $on }}{{ $on = true }}{{ end }}
{{- $blocks = append $blocks (default dict $file.units) }}
{{- end }}
{{- end }}
{{- range default (list dict) $blocks }}
{{- $name := default (default "volcano.sh/gpu-mem" .name) $values.name }}
{{- $size := default (default "128Mi" .size) $values.size }}
{{- $percentage := dig "percentage" "volcano.sh/gpu-core" . }}
{{- if not (kindIs "invalid" $values.percentage) }}{{ $percentage = $values.percentage }}{{ end }}
{{- if ne "mps" (default "mps" .enforce) }}{{ $percentage = "" }}{{ end }}
{{- if $percentage }}{{ $percentage = printf "%s.percentage" $percentage }}{{ end }}
{{- $pair := dict "memory" (printf "%s.%s" $name $size) "percentage" (default "" $percentage) "mib" (get (dict "128Mi" 128 "256Mi" 256 "1Gi" 1024) $size) }}
{{- $_ := set $pairs (toJson $pair) $pair }}
{{- end }}
{{- $memory := list }}{{ $percentages := list }}
{{- range $key := keys $pairs | sortAlpha }}
{{- $memory = append $memory (get $pairs $key).memory | uniq }}
{{- with (get $pairs $key).percentage }}{{ $percentages = append $percentages . | uniq }}{{ end }}
{{- end }}
{{- $units := dict "on" $on "memory" $memory "percentages" $percentages }}
{{- if and $values.hami (gt (len $pairs) 1) }}
{{- fail (printf "units.hami is true, and the files of config.map have several resources (%s): pods with HAMi's words get one; set units.name, units.size and units.percentage" (join ", " (concat $memory $percentages))) }}
{{- end }}
{{- if and $values.hami (not $on) }}
{{- fail "units.hami is true, and no file of config.map has a selector with units; where the file of config.name has one, set units.enabled to true" }}
{{- end }}
{{- if and $values.hami (include "gpu-device-plugin.mutates" .) }}{{ $_ := set $units "hami" (first (values $pairs)) }}{{ end }}
{{- toJson $units }}
{{- end }}

{{- /* Whether the API server has MutatingAdmissionPolicies. */}}
{{- define "gpu-device-plugin.mutates" -}}
{{- if .Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy" }}true{{ end }}
{{- end }}
