{{/* The environment of some lists in YAML. A variable that occurs twice has its last value: Kubernetes refuses the other. */}}
{{- define "tandem.lastOfEachName" -}}
{{- $last := dict }}{{ $names := list }}
{{- range . }}{{ range fromYamlArray . }}{{ $_ := set $last .name . }}{{ $names = append $names .name }}{{ end }}{{ end }}
{{- range uniq $names }}
- {{ get $last . | toJson }}
{{- end }}
{{- end -}}

{{- define "tandem.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* dict root, worker (bool) */}}
{{- define "tandem.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if and .worker .root.Values.rdma.enabled }}
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}

{{/* Environment of every container that runs Tandem. The cache folder holds logs and compiled kernels. */}}
{{- define "tandem.env" -}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_worker_niceness, value: "0"}
- {name: RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, value: "1"}
- {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
- {name: RAY_ROTATION_MAX_BYTES, value: "{{ mul 1048576 (.Values.serving.logMaxMib | int) }}"}
- {name: RAY_ROTATION_BACKUP_COUNT, value: "4"}
- {name: HOME, value: /var/cache/tandem}
- {name: XDG_CACHE_HOME, value: /var/cache/tandem}
- {name: TRITON_CACHE_DIR, value: /var/cache/tandem/triton}
{{- if .Values.kubeRay.enabled }}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "tandem.rayTokenSecret" . | quote }}, key: auth_token}}
- {name: TANDEM_CONTROLLER, value: "{{ include "tandem.name" . }}-controller:50052"}
{{- end }}
{{- if eq .Values.model.source "hub" }}
- {name: HF_HOME, value: {{ .Values.model.mountPath | quote }}}
- {name: HF_HUB_OFFLINE, value: "1"}    # the init container has downloaded the model
{{- end }}
{{- end -}}

{{- define "tandem.workerEnv" -}}
- {name: UCX_TCP_PORT_RANGE, value: "{{ .Values.networkPolicy.kvPorts.first | int }}-{{ .Values.networkPolicy.kvPorts.last | int }}"}
{{- if .Values.rdma.netDevices }}
- {name: UCX_NET_DEVICES, value: {{ .Values.rdma.netDevices | quote }}}
{{- end }}
{{- include "tandem.fabricEnv" . }}
{{- end -}}

{{/* Environment of UCX and NCCL in workers. */}}
{{- define "tandem.fabricEnv" -}}
{{- range $name, $value := .Values.ucx }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- range $name, $value := .Values.nccl }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end -}}

{{/* Ports of a NetworkPolicy: every TCP port except for those where UCX listens. */}}
{{- define "tandem.allButKvPorts" -}}
- {protocol: TCP, port: 1, endPort: {{ sub (int .Values.networkPolicy.kvPorts.first) 1 }}}
- {protocol: TCP, port: {{ add (int .Values.networkPolicy.kvPorts.last) 1 }}, endPort: 65535}
{{- end -}}

{{- define "tandem.mounts" -}}
- {name: shm, mountPath: /dev/shm}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/tandem}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The cluster's token, for `tandem up` and the commands that call the controller, which pass it to Ray's processes. */}}
{{- define "tandem.tokenEnv" -}}
- {name: TANDEM_CLUSTER_TOKEN_FILE, value: /etc/tandem/token/cluster-token}
{{- end -}}

{{- define "tandem.tokenMount" -}}
- {name: token, mountPath: /etc/tandem/token, readOnly: true}
{{- end -}}

{{- define "tandem.tokenVolume" -}}
- name: token
  secret:
    secretName: {{ include "tandem.clusterTokenSecret" . | quote }}
    defaultMode: 0440
    items: [{key: {{ .Values.auth.clusterToken.key | quote }}, path: cluster-token}]
{{- end -}}

{{/* "true" if there are API keys or a metrics key, else empty. */}}
{{- define "tandem.hasKeys" -}}
{{- if or .Values.auth.apiKeys.existingSecret .Values.auth.metricsKey.existingSecret }}true{{ end -}}
{{- end -}}

{{- define "tandem.keysMount" -}}
{{- if include "tandem.hasKeys" . }}
- {name: keys, mountPath: /etc/tandem/keys, readOnly: true}
{{- end }}
{{- if .Values.tls.existingSecret }}
- {name: tls, mountPath: /etc/tandem/tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "tandem.keysVolume" -}}
{{- with .Values.tls }}
{{- if .existingSecret }}
- name: tls
  secret:
    secretName: {{ .existingSecret | quote }}
    defaultMode: 0440
    items:
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
      {{- if .clientCaKey }}
      - {key: {{ .clientCaKey | quote }}, path: client-ca.crt}
      {{- end }}
{{- end }}
{{- end }}
{{- if include "tandem.hasKeys" . }}
- name: keys
  projected:
    defaultMode: 0440
    sources:
      {{- range $file, $key := dict "api-keys" .Values.auth.apiKeys "metrics-key" .Values.auth.metricsKey }}
      {{- if $key.existingSecret }}
      - secret: {name: {{ $key.existingSecret | quote }}, items: [{key: {{ $key.key | quote }}, path: {{ $file }}}]}
      {{- end }}
      {{- end }}
{{- end }}
{{- end -}}

{{- define "tandem.modelMount" -}}
{{- if ne .Values.model.source "image" }}
- name: model
  mountPath: {{ .Values.model.mountPath | quote }}
  readOnly: true
  {{- if and (has .Values.model.source (list "pvc" "hub")) .Values.model.pvc.subPath }}
  subPath: {{ .Values.model.pvc.subPath | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "tandem.volumes" -}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory }}}
- {name: tmp, emptyDir: {}}
- {name: cache, emptyDir: {}}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The claim with the model or the downloads, empty if there is none: an existing one, or the chart's own. */}}
{{- define "tandem.modelClaim" -}}
{{- $own := ternary (printf "%s-models" (include "tandem.name" .)) "" (ne .Values.model.pvc.size "") -}}
{{ .Values.model.pvc.claimName | default $own }}
{{- end -}}

{{/* The volume of the model, or of the Hub's cache: a claim, a folder of the host, or the pod's own. */}}
{{- define "tandem.modelVolume" -}}
{{- $model := .Values.model }}{{ $downloads := eq $model.source "hub" }}
{{- $claim := include "tandem.modelClaim" . }}
{{- if and $claim (has $model.source (list "pvc" "hub")) }}
- name: model
  persistentVolumeClaim: {claimName: {{ $claim | quote }}{{ if not $downloads }}, readOnly: true{{ end }}}
{{- else if or (eq $model.source "hostPath") (and $downloads $model.hostPath) }}
- name: model
  hostPath: {path: {{ $model.hostPath | quote }}, type: Directory}
{{- else if ne $model.source "image" }}
{{- $limit := ternary $model.hub.sizeLimit $model.init.sizeLimit $downloads }}
- name: model
  emptyDir: {{ if $limit }}{sizeLimit: {{ $limit }}}{{ else }}{}{{ end }}
{{- end }}
{{- end -}}

{{- define "tandem.downloadEnv" -}}
- {name: HOME, value: /var/cache/tandem}
- {name: HF_HOME, value: {{ .Values.model.mountPath | quote }}}
{{- with .Values.model.hub }}
{{- if .endpoint }}
- {name: HF_ENDPOINT, value: {{ .endpoint | quote }}}
{{- end }}
{{- if .token.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .token.existingSecret | quote }}, key: {{ .token.key | quote }}}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "tandem.modelInit" -}}
{{- $model := .Values.model }}
{{- if has $model.source (list "init" "hub") }}
initContainers:
  - name: model
    {{- if eq $model.source "hub" }}
    image: {{ include "tandem.image" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    command: [tandem, models, pull, {{ $model.hub.id | quote }}]
    env: {{- include "tandem.lastOfEachName" (list (include "tandem.downloadEnv" .) (toYaml .Values.extraEnv)) | nindent 6 }}
    {{- else }}
    image: {{ $model.init.image | default (include "tandem.image" .) }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    command: {{- toYaml $model.init.command | nindent 6 }}
    {{- with $model.init.env }}
    env: {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- end }}
    securityContext: {{- include "tandem.containerSecurity" (dict "root" . "worker" false) | nindent 6 }}
    volumeMounts:
      - name: model
        mountPath: {{ $model.mountPath | quote }}
        {{- if and (eq $model.source "hub") $model.pvc.subPath }}
        subPath: {{ $model.pvc.subPath | quote }}
        {{- end }}
      - {name: tmp, mountPath: /tmp}
      - {name: cache, mountPath: /var/cache/tandem}
{{- end }}
{{- end -}}

{{/* Prints the logs of the pod's processes, which are files, for `kubectl logs` and log collectors. */}}
{{- define "tandem.logs" -}}
- name: logs
  image: {{ include "tandem.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [tandem, logs, --follow]
  env:
    - {name: XDG_CACHE_HOME, value: /var/cache/tandem}
    - {name: PYTHONUNBUFFERED, value: "1"}
  resources: {{- toYaml .Values.logs.resources | nindent 4 }}
  securityContext: {{- include "tandem.containerSecurity" (dict "root" . "worker" false) | nindent 4 }}
  volumeMounts:
    - {name: cache, mountPath: /var/cache/tandem, readOnly: true}
{{- end -}}

{{/* Probes of one of Ray's ports: they fail once this node has left the cluster. dict root, port */}}
{{- define "tandem.rayProbes" -}}
startupProbe: {{- merge (dict "tcpSocket" (dict "port" .port)) .root.Values.probes.startup | toYaml | nindent 2 }}
livenessProbe: {{- merge (dict "tcpSocket" (dict "port" .port)) .root.Values.probes.liveness | toYaml | nindent 2 }}
readinessProbe: {{- merge (dict "tcpSocket" (dict "port" .port)) .root.Values.probes.readiness | toYaml | nindent 2 }}
{{- end -}}

{{/* The common beginning of every pod's spec. dict root, part (values of head, router or a group) */}}
{{- define "tandem.podCommon" -}}
serviceAccountName: {{ include "tandem.serviceAccount" .root | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext: {{- include "tandem.podSecurity" .root | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .part.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* dict root, part, name, worker (bool) */}}
{{- define "tandem.podMeta" -}}
labels:
  {{- include "tandem.selector" .root | nindent 2 }}
  tandem/part: {{ .name | quote }}
  {{- if .worker }}
  tandem/workers: "true"
  {{- end }}
{{- with .part.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Where a pod may run: its own affinity comes before the chart's with the same key. dict part, chart (an affinity) */}}
{{- define "tandem.affinity" -}}
{{- with merge (deepCopy (.part.affinity | default dict)) .chart }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Scheduling constraints that keep workers on one fabric. dict root, name, group */}}
{{- define "tandem.fabric" -}}
{{- $fabric := .root.Values.fabric }}{{ $affinity := dict }}
{{- if eq $fabric.policy "together" }}
{{- $term := dict "topologyKey" $fabric.topologyKey "labelSelector" (dict "matchLabels" (dict "tandem/release" .root.Release.Name "tandem/workers" "true")) }}
{{- $preferred := dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $term)) }}
{{- $required := dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term) }}
{{- $affinity = dict "podAffinity" (ternary $required $preferred $fabric.required) }}
{{- end }}
{{- include "tandem.affinity" (dict "part" .group "chart" $affinity) }}
{{- if eq $fabric.policy "spread" }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ $fabric.topologyKey | quote }}
    whenUnsatisfiable: {{ ternary "DoNotSchedule" "ScheduleAnyway" $fabric.required }}
    labelSelector:
      matchLabels:
        {{- include "tandem.selector" .root | nindent 8 }}
        tandem/part: {{ .name | quote }}
{{- end }}
{{- end -}}
