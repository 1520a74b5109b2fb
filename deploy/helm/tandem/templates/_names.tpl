{{/* Names of Services have no dots, those of releases may. */}}
{{- define "tandem.name" -}}
{{- $name := .Release.Name | replace "." "-" -}}
{{- if not (contains .Chart.Name $name) -}}{{ $name = printf "%s-%s" $name .Chart.Name }}{{ end -}}
{{ $name | trunc 40 | trimSuffix "-" }}
{{- end -}}

{{- define "tandem.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* The selector of this release's pods. KubeRay sets app.kubernetes.io labels of its own, so these differ. */}}
{{- define "tandem.selector" -}}
tandem/release: {{ .Release.Name | quote }}
{{- end -}}

{{- define "tandem.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "tandem.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "tandem.name" .) "default" .Values.serviceAccount.create) }}
{{- end -}}

{{- define "tandem.clusterTokenSecret" -}}
{{ .Values.auth.clusterToken.existingSecret | default (printf "%s-cluster-token" (include "tandem.name" .)) }}
{{- end -}}

{{- define "tandem.rayTokenSecret" -}}
{{ .Values.auth.rayToken.existingSecret | default (printf "%s-ray-token" (include "tandem.name" .)) }}
{{- end -}}

{{/* The number of workers of a role: replicas × places over all groups. */}}
{{- define "tandem.places" -}}
{{- $role := .role -}}{{- $count := 0 -}}
{{- range .root.Values.groups }}{{ $count = add $count (mul .replicas (get .places $role)) }}{{ end -}}
{{ $count }}
{{- end -}}

{{/* The maximum number of pods of a group. */}}
{{- define "tandem.maxReplicas" -}}
{{- if kindIs "invalid" .maxReplicas }}{{ .replicas | int }}{{ else }}{{ .maxReplicas | int }}{{ end -}}
{{- end -}}

{{/* "true" if some group may grow, else empty. */}}
{{- define "tandem.grows" -}}
{{- $grows := false -}}
{{- range .Values.groups }}{{ if gt (int (include "tandem.maxReplicas" .)) (int .replicas) }}{{ $grows = true }}{{ end }}{{ end -}}
{{- if $grows }}true{{ end -}}
{{- end -}}

{{/* "true" if KV pages may be transferred between pods, else empty. */}}
{{- define "tandem.handsOverBetweenPods" -}}
{{- $pods := 0 -}}
{{- range .Values.groups }}{{ $pods = add $pods (include "tandem.maxReplicas" . | int) }}{{ end -}}
{{- if and (gt (int $pods) 1) (ne .Values.serving.mode "colocated") }}true{{ end -}}
{{- end -}}

{{/* The number of workers of both roles that fit: the smaller number of places in each pod. */}}
{{- define "tandem.bothPlaces" -}}
{{- $count := 0 -}}
{{- range .Values.groups }}{{ $count = add $count (mul .replicas (min .places.prefill .places.decode)) }}{{ end -}}
{{ $count }}
{{- end -}}

{{/* The number that a quantity such as 64Gi or 500m stands for; 0 if it is none. */}}
{{- define "tandem.amount" -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $number := regexFind "^[0-9.]+" (toString .) -}}
{{- mulf $number (get $units (trimPrefix $number (toString .)) | default 0) -}}
{{- end -}}

{{/* Checks that the schema cannot express, such as those that depend on two values. */}}
{{- define "tandem.check" -}}
{{- if not (regexMatch "^[a-z]" .Release.Name) -}}
{{- fail (printf "release name %s begins with a digit, with which names of Services and of RayClusters may not begin: choose another" .Release.Name) -}}
{{- end -}}
{{- $parts := dict "head" .Values.head "router" .Values.router "logs" .Values.logs "autoscaling" .Values.autoscaling -}}
{{- range $name, $group := .Values.groups }}{{ $_ := set $parts (printf "groups.%s" $name) $group }}{{ end -}}
{{- range $name, $part := $parts -}}
{{- $resources := $part.resources | default dict -}}
{{- range $resource, $limit := $resources.limits -}}
{{- $request := get ($resources.requests | default dict) $resource -}}
{{- $most := include "tandem.amount" $limit | float64 -}}
{{- if and $most (gt (include "tandem.amount" $request | float64) $most) -}}
{{- fail (printf "%s.resources: the request of %s, %v, is above its limit, %v: set both" $name $resource $request $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $volumes := list "shm" "tmp" "cache" -}}
{{- range .Values.extraVolumes }}{{ $volumes = append $volumes .name }}{{ end -}}
{{- range .Values.extraVolumeMounts -}}
{{- if not (has .name $volumes) -}}{{- fail (printf "extraVolumeMounts: %s is the name of none of extraVolumes" .name) -}}{{- end -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $setting := printf "%sTensorParallelSize" $role -}}
{{- if and (index $.Values.serving $setting) (ne $.Values.serving.mode "disaggregated") -}}
{{- fail (printf "serving.%s is for serving.mode disaggregated: set serving.tensorParallelSize" $setting) -}}
{{- end -}}
{{- end -}}
{{- range $setting := list "prefillPipelineSize" "prefillContextParallelSize" -}}
{{- if gt (int (index $.Values.serving $setting)) 1 -}}
{{- if ne $.Values.serving.mode "disaggregated" -}}
{{- fail (printf "serving.%s is for serving.mode disaggregated, whose decode workers have none of it: set it to 1" $setting) -}}
{{- end -}}
{{- if eq $.Values.planner.mode "on" -}}
{{- fail (printf "serving.%s excludes planner.mode on, which changes the roles of workers: set one of them to 1 or off" $setting) -}}
{{- end -}}
{{- if $.Values.serving.draft -}}
{{- fail (printf "serving.%s excludes serving.draft: set one of them to 1 or empty" $setting) -}}
{{- end -}}
{{- if eq $.Values.serving.speculate "mtp" -}}
{{- fail (printf "serving.%s excludes serving.speculate mtp: set one of them to 1 or off" $setting) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (gt (int .Values.serving.prefillContextParallelSize) 1) (or (gt (int (.Values.serving.prefillTensorParallelSize | default .Values.serving.tensorParallelSize)) 1) (gt (int .Values.serving.prefillPipelineSize) 1)) -}}
{{- fail "serving.prefillContextParallelSize excludes prefill workers that divide the model: set prefillTensorParallelSize and prefillPipelineSize to 1" -}}
{{- end -}}
{{- with .Values.serving.kvTiers -}}
{{- if and .diskHostPath (not .diskGib) -}}
{{- fail "serving.kvTiers.diskHostPath needs serving.kvTiers.diskGib, the size of the files in it" -}}
{{- end -}}
{{- if and (or .hostGib .diskGib) (gt (int (max $.Values.serving.tensorParallelSize ($.Values.serving.prefillTensorParallelSize | default 1) ($.Values.serving.decodeTensorParallelSize | default 1) $.Values.serving.prefillPipelineSize $.Values.serving.prefillContextParallelSize)) 1) -}}
{{- fail "serving.kvTiers is for workers of one GPU: set the sizes of kvTiers to 0, or all parallel sizes to 1" -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.serving.mode "disaggregated" -}}
{{- range $role := list "prefill" "decode" -}}
{{- if lt (int (include "tandem.places" (dict "root" $ "role" $role))) 1 -}}
{{- fail (printf "no group has a place for a %s worker: give groups.%s.replicas and places.%s at least 1, or set serving.mode" $role $role $role) -}}
{{- end -}}
{{- end -}}
{{- else if lt (int (include "tandem.bothPlaces" .)) 1 -}}
{{- fail (printf "serving.mode %s needs pods with places of both roles: set groups.both.replicas" .Values.serving.mode) -}}
{{- end -}}
{{- range $name, $group := .Values.groups -}}
{{- $all := $.Values.serving.tensorParallelSize -}}
{{- $gpus := mul $all (max $group.places.prefill $group.places.decode) -}}
{{- if eq $.Values.serving.mode "disaggregated" -}}
{{- $gpus = add (mul $group.places.prefill ($.Values.serving.prefillTensorParallelSize | default $all) $.Values.serving.prefillPipelineSize $.Values.serving.prefillContextParallelSize) (mul $group.places.decode ($.Values.serving.decodeTensorParallelSize | default $all)) -}}
{{- end -}}
{{- if lt (int (include "tandem.maxReplicas" $group)) (int $group.replicas) -}}
{{- fail (printf "groups.%s.maxReplicas is less than replicas, %d" $name (int $group.replicas)) -}}
{{- end -}}
{{- if and (gt (int (include "tandem.maxReplicas" $group)) 0) (eq $.Values.serving.device "cuda") (gt (int $gpus) (int $group.gpu.count)) -}}
{{- fail (printf "groups.%s: the workers of a pod need %d GPUs (places × tensor parallel size × prefill pipeline or context parallel size), gpu.count is %d" $name (int $gpus) (int $group.gpu.count)) -}}
{{- end -}}
{{- end -}}
{{- if gt (add .Values.drain.seconds 60) (int .Values.drain.gracePeriodSeconds) -}}
{{- fail (printf "drain.gracePeriodSeconds (%d) has to be at least 60 more than drain.seconds (%d)" (int .Values.drain.gracePeriodSeconds) (int .Values.drain.seconds)) -}}
{{- end -}}
{{- if gt (int .Values.networkPolicy.kvPorts.first) (int .Values.networkPolicy.kvPorts.last) -}}
{{- fail "networkPolicy.kvPorts.first is above last" -}}
{{- end -}}
{{- if and .Values.rdma.enabled .Values.rdma.hostNetwork .Values.networkPolicy.enabled (not .Values.networkPolicy.nodes) -}}
{{- fail "rdma.hostNetwork needs networkPolicy.nodes, the hosts of workers: to a NetworkPolicy, pods on their hosts' network are these hosts" -}}
{{- end -}}
{{- if and (gt (int .Values.router.replicas) 1) (not .Values.router.workersOutliveSeconds) -}}
{{- fail (printf "router.replicas %d needs router.workersOutliveSeconds above 0: else each router would start workers of its own" (int .Values.router.replicas)) -}}
{{- end -}}
{{- if and (gt (int .Values.router.replicas) 1) .Values.monitoring.serviceMonitor.enabled (eq .Values.monitoring.serviceMonitor.scrape "processes") -}}
{{- fail "monitoring.serviceMonitor.scrape processes knows one router: with router.replicas above 1 scrape the cluster" -}}
{{- end -}}
{{- if ne (empty .Values.hugepages.size) (empty .Values.hugepages.amount) -}}{{- fail "hugepages.size and hugepages.amount need each other" -}}{{- end -}}
{{- range $part := list "workers" "prefill" "decode" -}}
{{- $range := splitList ":" (index $.Values.planner $part) -}}
{{- if and (eq (len $range) 2) (gt (int (index $range 0)) (int (index $range 1))) -}}{{- fail (printf "planner.%s: %s is no range, its minimum is above its maximum" $part (index $.Values.planner $part)) -}}{{- end -}}
{{- end -}}
{{- if and (eq .Values.planner.mode "on") (ne .Values.serving.mode "disaggregated") (not .Values.planner.workers) -}}
{{- fail (printf "planner.mode on needs planner.workers where serving.mode is %s: without roles, only the number of workers can change" .Values.serving.mode) -}}
{{- end -}}
{{- if not .Values.kubeRay.enabled -}}
{{- $pods := 0 -}}
{{- range $name, $group := .Values.groups -}}{{ $pods = add $pods (include "tandem.maxReplicas" $group | int) }}{{ end -}}
{{- if ne (int $pods) 1 -}}{{- fail (printf "kubeRay.enabled false is for one pod with all workers: set replicas of one group to 1, and of the others to 0; there are %d" (int $pods)) -}}{{- end -}}
{{- if gt (int .Values.router.replicas) 1 -}}{{- fail "router.replicas above 1 needs kubeRay.enabled" -}}{{- end -}}
{{- if or .Values.rdma.enabled .Values.monitoring.serviceMonitor.enabled -}}{{- fail "rdma and monitoring.serviceMonitor need kubeRay.enabled: workers of one pod need no network, and its metrics are on the pod's loopback address" -}}{{- end -}}
{{- end -}}
{{- if and .Values.model.pvc.size (or .Values.model.pvc.claimName (ne .Values.model.source "hub")) -}}{{- fail "model.pvc.size creates a claim for the downloads of model.source hub: leave it empty with another source, or with model.pvc.claimName" -}}{{- end -}}
{{- if ne (eq .Values.model.source "hub") (ne .Values.model.hub.id "") -}}{{- fail "model.hub.id is the model of model.source hub: set both" -}}{{- end -}}
{{- $below := printf "%s/" (trimSuffix "/" .Values.model.mountPath) -}}
{{- if and (not (has .Values.model.source (list "image" "hub"))) (not (hasPrefix $below (printf "%s/" (trimSuffix "/" .Values.model.path)))) -}}
{{- fail (printf "model.path %s is not below model.mountPath %s, where model.source %s puts the model" .Values.model.path .Values.model.mountPath .Values.model.source) -}}
{{- end -}}
{{- if and (eq .Values.model.source "pvc") (not .Values.model.pvc.claimName) -}}{{- fail "model.source pvc needs model.pvc.claimName" -}}{{- end -}}
{{- if and (eq .Values.model.source "hostPath") (not .Values.model.hostPath) -}}{{- fail "model.source hostPath needs model.hostPath" -}}{{- end -}}
{{- if and (eq .Values.model.source "init") (not .Values.model.init.command) -}}{{- fail "model.source init needs model.init.command" -}}{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) -}}{{- fail "ingress.enabled needs ingress.host" -}}{{- end -}}
{{- if and .Values.ingress.enabled (eq .Values.ingress.host .Values.ingress.grpcHost) -}}{{- fail "ingress.grpcHost has to be another name than ingress.host" -}}{{- end -}}
{{- if and .Values.gateway.enabled (not .Values.gateway.parentRefs) -}}{{- fail "gateway.enabled needs gateway.parentRefs" -}}{{- end -}}
{{- if and .Values.gateway.enabled .Values.gateway.grpcHostnames -}}
{{- if not .Values.gateway.hostnames -}}{{- fail "gateway.grpcHostnames needs gateway.hostnames: without, HTTP has all names, and a Gateway takes one kind of route a name" -}}{{- end -}}
{{- range $http := .Values.gateway.hostnames }}{{ range $grpc := $.Values.gateway.grpcHostnames -}}
{{- if or (eq $http $grpc) (and (hasPrefix "*." $http) (hasSuffix (trimPrefix "*" $http) $grpc)) (and (hasPrefix "*." $grpc) (hasSuffix (trimPrefix "*" $grpc) $http)) -}}
{{- fail (printf "gateway.grpcHostnames: %s is one of gateway.hostnames, too (%s), and a Gateway takes one kind of route a name" $grpc $http) -}}
{{- end -}}
{{- end }}{{ end -}}
{{- end -}}
{{- if not (or .Values.auth.apiKeys.existingSecret .Values.auth.insecure) -}}
{{- fail "auth.apiKeys.existingSecret is needed: without keys, every client that reaches the router is served, which takes auth.insecure=true" -}}
{{- end -}}
{{- if and .Values.tls.clientCaKey (not .Values.tls.existingSecret) -}}
{{- fail "tls.clientCaKey needs tls.existingSecret: clients show certificates to a router that has one" -}}
{{- end -}}
{{- if and .Values.monitoring.serviceMonitor.enabled (not .Values.auth.metricsKey.existingSecret) -}}
{{- fail "monitoring.serviceMonitor needs auth.metricsKey.existingSecret: without a key, metrics are closed" -}}
{{- end -}}
{{- end -}}
