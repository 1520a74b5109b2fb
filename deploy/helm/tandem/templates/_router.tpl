{{/* `tandem up` and its options, as tests/unit/deploy parse them. */}}
{{- define "tandem.up" -}}
- tandem
- up
{{- if .Values.kubeRay.enabled }}
- --address=auto
- --places-timeout={{ .Values.serving.placesTimeoutSeconds | int }}
{{- end }}
- --start-timeout={{ .Values.serving.startTimeoutSeconds | int }}
- --stop-grace={{ .Values.drain.routerSeconds | int }}
{{- $outlive := .Values.router.workersOutliveSeconds | int }}
{{- if and .Values.kubeRay.enabled $outlive }}
- --workers-outlive={{ $outlive }}
- --cluster-name={{ include "tandem.name" $ }}
{{- end }}
- --model={{ ternary .Values.model.hub.id .Values.model.path (eq .Values.model.source "hub") }}
- --device={{ .Values.serving.device }}
- --mode={{ .Values.serving.mode }}
{{- if gt (int .Values.serving.tensorParallelSize) 1 }}
- --tensor-parallel-size={{ .Values.serving.tensorParallelSize | int }}
{{- end }}
{{- with .Values.serving.prefillTensorParallelSize | int }}
- --prefill-tensor-parallel-size={{ . }}
{{- end }}
{{- with .Values.serving.decodeTensorParallelSize | int }}
- --decode-tensor-parallel-size={{ . }}
{{- end }}
{{- if gt (int .Values.serving.prefillPipelineSize) 1 }}
- --prefill-pipeline-size={{ .Values.serving.prefillPipelineSize | int }}
{{- end }}
{{- if gt (int .Values.serving.prefillContextParallelSize) 1 }}
- --prefill-context-parallel-size={{ .Values.serving.prefillContextParallelSize | int }}
{{- end }}
{{- with .Values.serving.kvTiers }}
{{- if gt (float64 .hostGib) 0.0 }}
- --kv-host-gib={{ .hostGib }}
{{- end }}
{{- if gt (float64 .diskGib) 0.0 }}
- --kv-disk-gib={{ .diskGib }}
- --kv-disk-path=/var/cache/tandem/kv
{{- end }}
{{- end }}
{{- if eq .Values.serving.mode "disaggregated" }}
- --prefill={{ include "tandem.places" (dict "root" . "role" "prefill") }}
- --decode={{ include "tandem.places" (dict "root" . "role" "decode") }}
{{- else }}
- --workers={{ include "tandem.bothPlaces" . }}
{{- end }}
{{- if and .Values.kubeRay.enabled .Values.networkPolicy.trustedNetwork }}
- --trusted-network
{{- end }}
- --host=0.0.0.0
{{- if and .Values.auth.insecure (not .Values.auth.apiKeys.existingSecret) }}
- --insecure
{{- end }}
- --grpc-port=50051
- --http-port=8000
- --metrics-port=9464
- --controller-port=50052
{{- if .Values.tls.existingSecret }}
- --operations-port=8001
- --tls-certificate=/etc/tandem/tls/tls.crt
- --tls-key=/etc/tandem/tls/tls.key
{{- if .Values.tls.clientCaKey }}
- --tls-client-ca=/etc/tandem/tls/client-ca.crt
{{- end }}
{{- end }}
- --log-format={{ .Values.serving.logFormat }}
- --log-max-mib={{ .Values.serving.logMaxMib | int }}
{{- with .Values.serving.defaultMaxTokens | int }}
- --default-max-tokens={{ . }}
{{- end }}
{{- if ne .Values.serving.speculate "auto" }}
- --speculate={{ .Values.serving.speculate }}
{{- end }}
{{- with .Values.serving.draft }}
- --draft={{ . }}
{{- end }}
{{- if ne .Values.planner.mode "off" }}
- --planner={{ .Values.planner.mode }}
- --planner-window={{ .Values.planner.windowSeconds }}
{{- range $role := list "workers" "prefill" "decode" }}
{{- with index $.Values.planner $role }}
- --planner-{{ $role }}={{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- range .Values.serving.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "tandem.routerPod" -}}
{{- include "tandem.podCommon" (dict "root" . "part" .Values.router) }}
{{- with .Values.router.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $apart := dict }}
{{- if gt (int .Values.router.replicas) 1 }}
{{- $others := dict "tandem/release" .Release.Name "tandem/part" "router" }}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" $others) }}
{{- $apart = dict "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $term))) }}
{{- end }}
{{- include "tandem.affinity" (dict "part" .Values.router "chart" $apart) }}
terminationGracePeriodSeconds: {{ add .Values.drain.routerSeconds 60 }}
# `tandem up` is a driver of the Ray node in the other container, which identifies drivers by process id.
shareProcessNamespace: true
{{- include "tandem.modelInit" . }}
containers:
  - name: ray-worker
    image: {{ include "tandem.image" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    env: {{- include "tandem.lastOfEachName" (list (include "tandem.env" .) (toYaml .Values.extraEnv)) | nindent 6 }}
    resources: {{- toYaml .Values.router.resources | nindent 6 }}
    securityContext: {{- include "tandem.containerSecurity" (dict "root" . "worker" false) | nindent 6 }}
    {{- include "tandem.rayProbes" (dict "root" . "port" 6380) | nindent 4 }}
    # The router runs in this Ray node: the container stays until `tandem up` in the other one has drained the requests
    # and closed the controller's listener.
    lifecycle:
      preStop:
        exec:
          command:
            - /bin/bash
            - -c
            - >-
              for _ in $(seq {{ add .Values.drain.routerSeconds 40 }}); do (: < "/dev/tcp/$POD_IP/50052") 2> /dev/null || exit 0; sleep 1; done
    # The router itself reads keys and certificates, again whenever they change.
    volumeMounts:
      {{- include "tandem.mounts" . | nindent 6 }}
      {{- include "tandem.keysMount" . | nindent 6 }}
      {{- include "tandem.modelMount" . | nindent 6 }}
  - {{- include "tandem.upContainer" (dict "root" . "resources" "requests: {cpu: 250m, memory: 1Gi}\nlimits: {memory: 2Gi}") | nindent 4 }}
  {{- include "tandem.logs" . | nindent 2 }}
volumes:
  {{- include "tandem.volumes" . | nindent 2 }}
  {{- include "tandem.tokenVolume" . | nindent 2 }}
  {{- include "tandem.keysVolume" . | nindent 2 }}
  {{- include "tandem.modelVolume" . | nindent 2 }}
{{- end -}}


{{/* dict root, group */}}
{{- define "tandem.upEnv" -}}
{{- with .root.Values }}
{{- if .kubeRay.enabled }}
{{- include "tandem.tokenEnv" $.root }}
{{- end }}
{{- if .auth.apiKeys.existingSecret }}
- {name: TANDEM_API_KEY_FILE, value: /etc/tandem/keys/api-keys}
{{- end }}
{{- if .auth.metricsKey.existingSecret }}
- {name: TANDEM_METRICS_KEY_FILE, value: /etc/tandem/keys/metrics-key}
{{- end }}
{{- end }}
{{- if .group }}
{{- include "tandem.fabricEnv" .root }}
{{- end }}
{{- end -}}

{{/* The container that runs `tandem up`. dict root, resources, group (of its workers, if it runs them itself) */}}
{{- define "tandem.upContainer" -}}
{{- $root := .root }}{{ $ray := $root.Values.kubeRay.enabled }}
name: tandem
image: {{ include "tandem.image" $root }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
command: {{- include "tandem.up" $root | nindent 2 }}
env: {{- include "tandem.lastOfEachName" (list (include "tandem.env" $root) (include "tandem.upEnv" .) (toYaml $root.Values.extraEnv) (toYaml (.group | default dict).env)) | nindent 2 }}
ports:
  - {name: grpc, containerPort: 50051}
  - {name: http, containerPort: 8000}
  {{- if $ray }}
  - {name: metrics, containerPort: 9464}
  - {name: controller, containerPort: 50052}
  {{- end }}
  {{- if $root.Values.tls.existingSecret }}
  - {name: operations, containerPort: 8001}
  {{- end }}
# The listeners open before the workers are ready; ready means that a request would be served now. The probes need no
# key. /live checks the router's event loop only, so that lost workers never restart a router. With TLS they have a
# port of their own: kubelet's gRPC probe has no TLS, and its HTTPS probe no certificate of a client.
{{- $port := ternary "operations" "http" (ne $root.Values.tls.existingSecret "") }}
{{- $ready := dict "grpc" (dict "port" 50051 "service" "tandem.v1.Inference") }}
{{- if $root.Values.tls.existingSecret }}{{ $ready = dict "httpGet" (dict "path" "/ready" "port" $port) }}{{ end }}
startupProbe: {{- merge (dict "httpGet" (dict "path" "/ready" "port" $port)) $root.Values.probes.startup | toYaml | nindent 2 }}
livenessProbe: {{- merge (dict "httpGet" (dict "path" "/live" "port" $port)) $root.Values.probes.liveness | toYaml | nindent 2 }}
readinessProbe: {{- merge $ready $root.Values.probes.readiness | toYaml | nindent 2 }}
resources: {{- .resources | nindent 2 }}
securityContext: {{- include "tandem.containerSecurity" (dict "root" $root "worker" false) | nindent 2 }}
lifecycle:
  preStop: {exec: {command: [sleep, "5"]}}
volumeMounts:
  {{- include "tandem.mounts" $root | nindent 2 }}
  {{- if $ray }}
  {{- include "tandem.tokenMount" $root | nindent 2 }}
  {{- end }}
  {{- include "tandem.keysMount" $root | nindent 2 }}
  {{- include "tandem.modelMount" $root | nindent 2 }}
  {{- if .group }}
  {{- include "tandem.workerMounts" $root | nindent 2 }}
  {{- end }}
{{- end -}}
