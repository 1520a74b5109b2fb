{{/* Ray's custom resources of a pod, as one shell argument: the number of workers of each role that fit. */}}
{{- define "tandem.offer" -}}
{{- $offer := dict -}}
{{- range $role, $count := . }}{{ if gt (int $count) 0 }}{{ $_ := set $offer $role (int $count) }}{{ end }}{{ end -}}
"{{ toJson $offer | replace "\"" "\\\"" }}"
{{- end -}}

{{/* The resources of a worker's container. dict root, group */}}
{{- define "tandem.workerResources" -}}
{{- $extra := dict -}}
{{- if gt (int .group.gpu.count) 0 }}{{ $_ := set $extra .group.gpu.resource (.group.gpu.count | int | toString) }}{{ end -}}
{{- if .root.Values.rdma.enabled }}{{ $_ := set $extra .root.Values.rdma.resource (.root.Values.rdma.count | int | toString) }}{{ end -}}
{{- if .root.Values.hugepages.size }}{{ $_ := set $extra (printf "hugepages-%s" .root.Values.hugepages.size) .root.Values.hugepages.amount }}{{ end -}}
requests: {{- merge (dict) $extra ((.group.resources | default dict).requests | default dict) | toYaml | nindent 2 }}
limits: {{- merge (dict) $extra ((.group.resources | default dict).limits | default dict) | toYaml | nindent 2 }}
{{- end -}}

{{/* Where a pod with workers may run. dict root, name, group */}}
{{- define "tandem.workerPlacement" -}}
{{- $root := .root }}{{ $group := .group }}
{{- $nodes := merge (dict) ($group.nodeSelector | default dict) (ternary (dict "nvidia.com/gpu.product" $group.gpu.product) (dict) (ne $group.gpu.product "")) }}
{{- with $nodes }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and $root.Values.runtimeClassName (gt (int $group.gpu.count) 0) }}
runtimeClassName: {{ $root.Values.runtimeClassName | quote }}
{{- end }}
{{- include "tandem.fabric" . }}
{{- end -}}

{{/* dict root, name, group */}}
{{- define "tandem.workerPod" -}}
{{- $root := .root }}{{ $group := .group }}
{{- include "tandem.podCommon" (dict "root" $root "part" $group) }}
{{- include "tandem.workerPlacement" . }}
{{- if and $root.Values.rdma.enabled $root.Values.rdma.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
terminationGracePeriodSeconds: {{ $root.Values.drain.gracePeriodSeconds | int }}
{{- include "tandem.modelInit" $root }}
containers:
  - name: ray-worker
    image: {{ include "tandem.image" $root }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    env: {{- include "tandem.lastOfEachName" (list (include "tandem.env" $root) (include "tandem.tokenEnv" $root) (include "tandem.workerEnv" $root) (toYaml $root.Values.extraEnv) (toYaml $group.env)) | nindent 6 }}
    resources: {{- include "tandem.workerResources" . | nindent 6 }}
    securityContext: {{- include "tandem.containerSecurity" (dict "root" $root "worker" true) | nindent 6 }}
    # Live while the Ray node is. Ready while a worker here serves, or none is starting: while a worker loads in a new
    # pod, the disruption budget evicts no other pod.
    startupProbe: {{- merge (dict "tcpSocket" (dict "port" 6380)) $root.Values.probes.startup | toYaml | nindent 6 }}
    livenessProbe: {{- merge (dict "tcpSocket" (dict "port" 6380)) $root.Values.probes.liveness | toYaml | nindent 6 }}
    readinessProbe: {{- merge (dict "exec" (dict "command" (list "/bin/sh" "-c" "exec tandem ready --node \"$POD_IP\""))) $root.Values.probes.workersReadiness | toYaml | nindent 6 }}
    # Without a controller a drain is impossible, and the pod ends anyway.
    lifecycle:
      preStop:
        exec:
          command:
            - /bin/sh
            - -c
            - exec tandem drain --node "$POD_IP" --grace {{ $root.Values.drain.seconds | int }}
    volumeMounts:
      {{- include "tandem.mounts" $root | nindent 6 }}
      {{- include "tandem.tokenMount" $root | nindent 6 }}
      {{- include "tandem.modelMount" $root | nindent 6 }}
      {{- include "tandem.workerMounts" $root | nindent 6 }}
  {{- include "tandem.logs" $root | nindent 2 }}
volumes:
  {{- include "tandem.volumes" $root | nindent 2 }}
  {{- include "tandem.tokenVolume" $root | nindent 2 }}
  {{- include "tandem.modelVolume" $root | nindent 2 }}
  {{- include "tandem.workerVolumes" $root | nindent 2 }}
{{- end -}}

{{- define "tandem.workerMounts" -}}
{{- if .Values.serving.kvTiers.diskHostPath }}
- {name: kv, mountPath: /var/cache/tandem/kv}
{{- end }}
{{- if .Values.hugepages.size }}
- {name: hugepages, mountPath: /hugepages}
{{- end }}
{{- end -}}

{{- define "tandem.workerVolumes" -}}
{{- with .Values.serving.kvTiers.diskHostPath }}
- {name: kv, hostPath: {path: {{ . | quote }}, type: Directory}}
{{- end }}
{{- if .Values.hugepages.size }}
- {name: hugepages, emptyDir: {medium: HugePages-{{ .Values.hugepages.size }}}}
{{- end }}
{{- end -}}
