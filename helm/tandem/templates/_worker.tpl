{{/* The pods of a pool, the same in a StatefulSet and in a RayCluster: root, pool, values. */}}

{{- define "tandem.workerSpec" -}}
{{- $values := .values -}}
{{- include "tandem.podCommon" (dict "root" .root "component" .pool "values" $values) }}
securityContext:
  {{- $security := deepCopy .root.Values.podSecurityContext }}
  {{- if $values.rdma.runAsRoot }}
  {{- range $key, $value := dict "runAsNonRoot" false "runAsUser" 0 "runAsGroup" 0 }}
  {{- $_ := set $security $key $value }}
  {{- end }}
  {{- end }}
  {{- toYaml $security | nindent 2 }}
{{- if $values.sameHost.hostIPC }}
hostIPC: true
{{- end }}
{{- if $values.sameHost.hostPID }}
hostPID: true
{{- end }}
{{- if $values.shareProcessNamespace }}
shareProcessNamespace: true
{{- end }}
# its own drain, then what ending the engine and closing takes
terminationGracePeriodSeconds: {{ add (int64 $values.options.drainDeadline) 15 }}
{{- with include "tandem.initContainers" .root }}
{{ . }}
{{- end }}
volumes:
  {{- include "tandem.volumes" .root | nindent 2 }}
  {{- include "tandem.tlsVolume" (dict "root" .root "kind" "worker") | nindent 2 }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ $values.sharedMemory }}}
  {{- if $values.hugePages2Mi }}
  - name: hugepages
    emptyDir: {medium: HugePages-2Mi}
  {{- end }}
  {{- with $values.volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "tandem.workerContainer" -}}
{{- $values := .values -}}
{{- $image := .values.image -}}
name: worker
image: {{ include "tandem.image" (dict "root" .root "image" $image) }}
imagePullPolicy: {{ default .root.Values.image.pullPolicy $image.pullPolicy }}
command: [tandem, worker]
args:
  - --role
  - {{ .pool }}
  - --worker-id
  - $(POD_NAME)
  - --model
  - {{ include "tandem.model" .root | quote }}
  {{- if and (eq .root.Values.model.source "hub") .root.Values.model.hub.revision }}
  - --model-revision
  - {{ .root.Values.model.hub.revision | quote }}
  {{- end }}
  - --host
  - $(POD_IP)
  - --port
  - "7000"
  {{- include "tandem.tlsArgs" .root | nindent 2 }}
  - --metrics-port
  - "7001"
  - --start-deadline
  - {{ include "tandem.number" $values.startDeadline | quote }}
  {{- include "tandem.options" $values.options | trim | nindent 2 }}
env:
  {{- include "tandem.env" (dict "root" .root "kind" "worker") | nindent 2 }}
  {{- with $values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - {name: grpc, containerPort: 7000}
  - {name: metrics, containerPort: 7001}
# Listens as soon as the model is loaded. 30 s beyond startDeadline: the worker ends itself then, and
# says why; the probe is for one that hangs.
startupProbe:
  httpGet: {path: /health, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ add (div $values.startDeadline 5) 6 }}
# The worker itself ends an engine that makes no turn for engineHangTimeout; the probe is for a
# worker that cannot, because its event loop hangs.
livenessProbe:
  httpGet: {path: /health, port: metrics}
  {{- include "tandem.livenessPatience" . | nindent 2 }}
readinessProbe:
  httpGet: {path: /ready, port: metrics}
  periodSeconds: 2
  {{- include "tandem.readinessPatience" . | nindent 2 }}
resources:
  {{- include "tandem.workerResources" $values | nindent 2 }}
securityContext:
  {{- include "tandem.containerSecurity" .root | nindent 2 }}
    {{- if $values.rdma.count }}
    add: [IPC_LOCK] # registers memory past RLIMIT_MEMLOCK
    {{- end }}
volumeMounts:
  {{- include "tandem.volumeMounts" .root | nindent 2 }}
  {{- include "tandem.tlsMount" .root | nindent 2 }}
  - {name: shm, mountPath: /dev/shm}
  {{- if $values.hugePages2Mi }}
  - {name: hugepages, mountPath: /dev/hugepages}
  {{- end }}
  {{- with $values.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Devices and huge pages are limits; Kubernetes takes their requests to be the same. */}}
{{- define "tandem.workerResources" -}}
{{- $resources := deepCopy .resources -}}
{{- $limits := default dict $resources.limits -}}
{{- if .gpu.count }}{{ $_ := set $limits .gpu.resource (.gpu.count | int64) }}{{ end -}}
{{- if .rdma.count }}{{ $_ := set $limits .rdma.resource (.rdma.count | int64) }}{{ end -}}
{{- if .hugePages2Mi }}{{ $_ := set $limits "hugepages-2Mi" .hugePages2Mi }}{{ end -}}
{{- toYaml (set $resources "limits" $limits) -}}
{{- end -}}
