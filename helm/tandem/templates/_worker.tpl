{{/* The pods of a pool, the same in a StatefulSet and in a RayCluster: root, pool, values. */}}

{{- define "tandem.workerSpec" -}}
{{- $values := .values -}}
{{- $near := dict "affinity" (include "tandem.nearAffinity" . | fromYaml) -}}
{{- include "tandem.podCommon" (dict "root" .root "component" .pool "values" (mergeOverwrite (deepCopy $values) $near)) }}
{{- with $values.resourceClaims }}
resourceClaims:
  {{- range . }}
  - name: {{ .name }}
    resourceClaimTemplateName: {{ include "tandem.claimTemplate" (dict "root" $.root "pool" $.pool "claim" .) }}
  {{- end }}
{{- end }}
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
{{- $ray := "" -}}
{{- if .root.Values.rayCluster.enabled -}}
{{- $image := empty (include "tandem.hasController" .root) | ternary dict $values.image -}}
{{- $ray = include "tandem.rayCertificate" (dict "root" .root "image" $image) -}}
{{- end }}
{{- $model := include "tandem.initContainers" .root }}
{{- if or $ray $model }}
{{ default "initContainers:" $model }}
  {{- $ray | nindent 2 }}
{{- end }}
volumes:
  {{- include "tandem.volumes" .root | nindent 2 }}
  {{- if .root.Values.rayCluster.enabled }}
  {{- include "tandem.rayTlsVolumes" .root | nindent 2 }}
  {{- end }}
  {{- include "tandem.tlsVolume" (dict "root" .root "kind" "worker") | nindent 2 }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ $values.sharedMemory }}}
  {{- if $values.hugePages2Mi }}
  - name: hugepages
    emptyDir: {medium: HugePages-2Mi}
  {{- end }}
  {{- if and .root.Values.gateway.enabled (eq .pool "decode") }}
  {{- include "tandem.frontVolumes" .root | trim | nindent 2 }}
  {{- end }}
  {{- with $values.volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* The options of a pool's worker: root, pool, values, id. */}}
{{- define "tandem.workerArgs" -}}
{{- $entry := include "tandem.entry" . | fromYaml -}}
{{- $revision := eq .root.Values.model.source "hub" | ternary .root.Values.model.hub.revision "" -}}
{{- $model := include "tandem.model" .root -}}
{{- if $entry -}}
{{- $revision = dig "hub" "revision" "" $entry -}}
{{- $model = include "tandem.modelOf" (dict "root" .root "entry" $entry) -}}
{{- end -}}
- --role
- {{ include "tandem.role" .pool }}
- --worker-id
- {{ .id | quote }}
- --model
- {{ $model | quote }}
{{- with $entry }}
- --group
- {{ .name }}
{{- end }}
{{- with $revision }}
- --model-revision
- {{ . | quote }}
{{- end }}
- --model-impl
- {{ .root.Values.model.impl }}
- --host
- $(POD_IP)
- --port
- "7000"
{{- include "tandem.tlsArgs" .root | nindent 0 }}
- --metrics-port
- "7001"
- --start-deadline
- {{ include "tandem.number" .values.startDeadline | quote }}
{{- include "tandem.common.options" .values.options | trim | nindent 0 }}
{{- end -}}

{{- define "tandem.workerContainer" -}}
{{- $values := .values -}}
{{- $image := .values.image -}}
name: worker
image: {{ include "tandem.image" (dict "root" .root "image" $image) }}
imagePullPolicy: {{ default .root.Values.image.pullPolicy $image.pullPolicy }}
{{- if include "tandem.hasController" .root }}
# KubeRay's command, which starts Ray. Ray's agent starts the worker (pools.json).
command: [bash, -c]
# A container that is started again finds the mark of the one before: leave_node made it.
args: ['rm -f /tmp/tandem/leaving; ulimit -n 65536 2>/dev/null; eval "exec $KUBERAY_GEN_RAY_START_CMD"']
# The worker is no child of the main process: it drains here, before Ray ends.
lifecycle:
  preStop:
    exec:
      command: [python, -m, tandem.cluster.processes.leave_node, {{ add (int64 $values.options.drainDeadline) 10 | quote }}]
{{- else }}
command: {{ include "tandem.program" "worker" }}
args:
  {{- include "tandem.workerArgs" (merge (dict "id" "$(POD_NAME)") .) | nindent 2 }}
{{- end }}
env:
  {{- include "tandem.env" (dict "root" .root "kind" "worker") | nindent 2 }}
  {{- if include "tandem.hasController" .root }}
  {{- include "tandem.rayEnv" .root | nindent 2 }}
  # The agent takes no GPU of Ray's, and hands on to its worker those of the container.
  - {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
  - {name: TANDEM_RUN_FOLDER, value: /tmp/tandem}
  {{- end }}
  {{- with $values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - {name: grpc, containerPort: 7000}
  - {name: metrics, containerPort: 7001}
{{- if include "tandem.hasController" .root }}
# The agent starts a worker that ended again, and the worker ends itself if its engine hangs.
livenessProbe:
  tcpSocket: {port: 6380}
  {{- include "tandem.livenessPatience" . | nindent 2 }}
readinessProbe:
  tcpSocket: {port: 6380}
  periodSeconds: 2
  {{- include "tandem.readinessPatience" . | nindent 2 }}
{{- else }}
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
{{- end }}
resources:
  {{- include "tandem.workerResources" $values | nindent 2 }}
securityContext:
  {{- include "tandem.containerSecurity" .root | nindent 2 }}
    {{- if or $values.rdma.count $values.rdma.runAsRoot }}
    add: [IPC_LOCK] # registers memory past RLIMIT_MEMLOCK
    {{- end }}
volumeMounts:
  {{- include "tandem.volumeMounts" .root | nindent 2 }}
  {{- include "tandem.tlsMount" .root | nindent 2 }}
  {{- if include "tandem.hasController" .root }}
  {{- include "tandem.rayTlsMount" .root | nindent 2 }}
  {{- end }}
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
{{- if .gpu.count -}}
{{- /* Each rank needs a GPU of its own. */ -}}
{{- $_ := set $limits .gpu.resource (max .gpu.count .options.tensorParallel | int64) -}}
{{- end -}}
{{- if .rdma.count }}{{ $_ := set $limits .rdma.resource (.rdma.count | int64) }}{{ end -}}
{{- if .hugePages2Mi }}{{ $_ := set $limits "hugepages-2Mi" .hugePages2Mi }}{{ end -}}
{{- $_ := set $resources "limits" $limits -}}
{{- range .resourceClaims }}
{{- $_ := set $resources "claims" (append (default list $resources.claims) (dict "name" .name)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* The name of a claim's ResourceClaimTemplate: root, pool, claim. It has a hash of the spec, which
     nobody may change in a template that is there. */}}
{{- define "tandem.claimTemplate" -}}
{{- if .claim.template -}}
{{- .claim.template -}}
{{- else -}}
{{- $hash := toJson .claim.spec | sha256sum | trunc 8 -}}
{{- printf "%s-%s-%s-%s" (include "tandem.fullname" .root) .pool .claim.name $hash -}}
{{- end -}}
{{- end -}}

{{/* The affinity of a pool's pods, with the wish to be near those of the other pool: root, pool, values. */}}
{{- define "tandem.nearAffinity" -}}
{{- $affinity := deepCopy .values.affinity -}}
{{- with .values.nearPeers -}}
{{- if .topologyKey -}}
{{- $role := include "tandem.role" $.pool -}}
{{- $other := printf "%s%s" (trimSuffix $role $.pool) (eq $role "prefill" | ternary "decode" "prefill") -}}
{{- $labels := include "tandem.selector" (dict "root" $.root "component" $other) | fromYaml -}}
{{- $term := dict "topologyKey" .topologyKey "labelSelector" (dict "matchLabels" $labels) -}}
{{- $wish := dict "weight" (int64 .weight) "podAffinityTerm" $term -}}
{{- $near := default dict $affinity.podAffinity -}}
{{- $kind := "preferredDuringSchedulingIgnoredDuringExecution" -}}
{{- $_ := set $near $kind (append (default list (index $near $kind)) $wish) -}}
{{- $_ := set $affinity "podAffinity" $near -}}
{{- end -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end -}}

{{/* The command of each pool's workers, for the controller. A node fills in $(NAME), the controller {id}. */}}
{{- define "tandem.poolsFile" -}}
{{- $pools := dict -}}
{{- range $pool := list "prefill" "decode" -}}
{{- $values := include "tandem.pool" (dict "root" $ "pool" $pool) | fromYaml -}}
{{- $with := dict "root" $ "pool" $pool "values" $values "id" "{id}" -}}
{{- $command := concat (list "tandem" "worker") (include "tandem.workerArgs" $with | fromYamlArray) -}}
{{- $_ := set $pools $pool (dict "command" $command) -}}
{{- end -}}
{{- toJson $pools -}}
{{- end -}}

{{/* Seconds until the controller has a worker killed: the longer grace period of the pools' pods. */}}
{{- define "tandem.controllerDrain" -}}
{{- $longest := 0 -}}
{{- range $pool := list "prefill" "decode" -}}
{{- $values := include "tandem.pool" (dict "root" $ "pool" $pool) | fromYaml -}}
{{- $longest = max $longest (add (int64 $values.options.drainDeadline) 15) -}}
{{- end -}}
{{- $longest -}}
{{- end -}}
