{{/* What pods of several components share. */}}

{{/* How every pod of ours is scheduled and secured: root, component, values. */}}
{{- define "tandem.podCommon" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.topologySpread }}
topologySpreadConstraints:
  {{- range . }}
  - {{ toYaml . | nindent 4 | trim }}
    labelSelector:
      matchLabels:
        {{- include "tandem.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The command that starts a program of ours. The kernel drops a SIGTERM to a container's first process
     until that has a handler; a blocked one waits for it. */}}
{{- define "tandem.program" -}}
[env, --block-signal=TERM, tandem, {{ . }}]
{{- end -}}

{{- define "tandem.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Six failures, one every 10 s, end a container. A busy node answers late, and a restart helps no
busy node. What hangs that long does not heed SIGTERM, so it does not get the pod's grace period. */}}
{{- define "tandem.livenessPatience" -}}
periodSeconds: 10
timeoutSeconds: 10
failureThreshold: 6
terminationGracePeriodSeconds: 15
{{- end -}}

{{- define "tandem.readinessPatience" -}}
timeoutSeconds: 5
failureThreshold: 3
{{- end -}}

{{/* The variables that services/tandem/common/config/cluster.py names, for routers and workers. */}}
{{- define "tandem.env" -}}
{{- $kind := .kind -}}
{{- with .root -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: TANDEM_CLUSTER_ID
  value: {{ printf "%s.%s" .Release.Namespace (include "tandem.fullname" .) }}
- name: TANDEM_CLUSTER_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "tandem.secretName" (dict "root" . "existing" .Values.clusterToken.existingSecret "name" "cluster") }}
      key: {{ .Values.clusterToken.key }}
{{- if .Values.redis.builtin.enabled }}
- name: REDIS_PASSWORD
  valueFrom:
    {{- include "tandem.redisPassword" (dict "root" . "kind" $kind) | nindent 4 }}
- name: TANDEM_REDIS_URL
  {{- $at := printf "%s:$(REDIS_PASSWORD)@%s-redis:6379/0" $kind (include "tandem.fullname" .) }}
  {{- if .Values.tls.internal.enabled }}
  value: rediss://{{ $at }}?ssl_ca_certs=/etc/tandem/tls/ca.crt&ssl_certfile=/etc/tandem/tls/tls.crt&ssl_keyfile=/etc/tandem/tls/tls.key
  {{- else }}
  value: redis://{{ $at }}
  {{- end }}
{{- else }}
- name: TANDEM_REDIS_URL
  {{- $own := index .Values.redis.external (printf "%sUrlSecret" $kind) | default dict }}
  {{- with $own.name | empty | ternary .Values.redis.external.urlSecret $own }}
  valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
  {{- end }}
{{- end }}
- name: TANDEM_LOG_LEVEL
  value: {{ .Values.logLevel }}
- name: TANDEM_LOG_FORMAT
  value: {{ .Values.logFormat }}
{{- with .Values.tracing }}
{{- if .endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ .endpoint | quote }}
- name: OTEL_EXPORTER_OTLP_PROTOCOL
  value: {{ .protocol }}
- name: OTEL_TRACES_SAMPLER
  value: parentbased_traceidratio
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ .sampleRatio | quote }}
{{- end }}
{{- end }}
- name: TANDEM_CACHE_DIR
  value: /cache/tandem
{{- if eq .Values.model.source "hub" }}
- name: HF_HOME
  value: /cache/hub
{{- with .Values.model.hub.tokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The password of the Redis user of a kind of process: root, kind. */}}
{{- define "tandem.redisPassword" -}}
{{- $redis := .root.Values.redis.builtin -}}
{{- $passwords := dict "router" $redis.password "worker" $redis.workerPassword "controller" $redis.controllerPassword -}}
{{- $name := eq .kind "router" | ternary "redis" (printf "redis-%s" .kind) -}}
{{- with index $passwords .kind -}}
secretKeyRef:
  name: {{ include "tandem.secretName" (dict "root" $.root "existing" .existingSecret "name" $name) }}
  key: {{ .key }}
{{- end -}}
{{- end -}}

{{/* The rules of a Redis user, which services/tandem/net/store/roles.py writes: root, kind. */}}
{{- define "tandem.redisRules" -}}
{{- $tag := printf "tandem:%s.%s" .root.Release.Namespace (include "tandem.fullname" .root) -}}
{{- $rules := .root.Files.Get (printf "redis/%s.acl" .kind) | trim -}}
{{- $rules | replace "%CLUSTER%" (trimPrefix "tandem:" $tag) -}}
{{- end -}}

{{/* The memory monitor would end what Ray started, which is small, for what it did not start. Workers
inherit the niceness of the agents that start them. */}}
{{- define "tandem.rayEnv" -}}
- name: RAY_memory_monitor_refresh_ms
  value: "0"
- name: RAY_worker_oom_score_adjustment
  value: "0"
- name: RAY_worker_niceness
  value: "0"
# `preStop` drains the worker. The agent stays, and Ray would wait for it.
- name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
  value: "0"
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "tandem.secretName" (dict "root" . "existing" .Values.ray.token.existingSecret "name" "ray") }}
      key: {{ .Values.ray.token.key }}
{{- with include "tandem.rayTlsEnv" . }}
{{ . }}
{{- end }}
{{- end -}}

{{/* The token of the pod's service account, as automountServiceAccountToken would have it, for the
     containers that mount it alone. */}}
{{- define "tandem.apiVolume" -}}
- name: api
  projected:
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3607}
      - configMap:
          name: kube-root-ca.crt
          items: [{key: ca.crt, path: ca.crt}]
      - downwardAPI:
          items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]
{{- end -}}

{{/* What --model is for a further model: root, entry. It is in the same place as the first model. */}}
{{- define "tandem.modelOf" -}}
{{- if .entry.hub -}} {{ .entry.hub.name }}
{{- else -}} {{ printf "/model/%s" (trimPrefix "/" .entry.path) | trimSuffix "/" }}
{{- end -}}
{{- end -}}

{{/* What --model is. */}}
{{- define "tandem.model" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "builtin" -}} smollm2
{{- else if eq $model.source "hub" -}} {{ $model.hub.name }}
{{- else if eq $model.source "pvc" -}} {{ printf "/model/%s" (trimPrefix "/" $model.pvc.path) | trimSuffix "/" }}
{{- else if eq $model.image.mount "copy" -}} /model/{{ base $model.image.path }}
{{- else -}} {{ printf "/model/%s" (trimPrefix "/" $model.image.path) | trimSuffix "/" }}
{{- end -}}
{{- end -}}

{{- define "tandem.volumeMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /cache}
{{- if has .Values.model.source (list "pvc" "image") }}
- {name: model, mountPath: /model, readOnly: true}
{{- end }}
{{- if and (not .Values.redis.builtin.enabled) .Values.redis.external.caSecret.name }}
- {name: redis-ca, mountPath: /etc/tandem/redis, readOnly: true}
{{- end }}
{{- end -}}

{{- define "tandem.volumes" -}}
- name: tmp
  emptyDir: {}
- name: cache
{{- if .Values.cache.claimName }}
  persistentVolumeClaim: {claimName: {{ .Values.cache.claimName }}}
{{- else }}
  emptyDir: {sizeLimit: {{ .Values.cache.sizeLimit }}}
{{- end }}
{{- if eq .Values.model.source "pvc" }}
- name: model
  persistentVolumeClaim: {claimName: {{ .Values.model.pvc.claimName }}, readOnly: true}
{{- else if eq .Values.model.source "image" }}
- name: model
{{- if eq .Values.model.image.mount "copy" }}
  emptyDir: {}
{{- else }}
  image:
    reference: {{ .Values.model.image.reference }}
    pullPolicy: {{ .Values.model.image.pullPolicy }}
{{- end }}
{{- end }}
{{- if and (not .Values.redis.builtin.enabled) .Values.redis.external.caSecret.name }}
- name: redis-ca
  secret:
    secretName: {{ .Values.redis.external.caSecret.name }}
    items: [{key: {{ .Values.redis.external.caSecret.key }}, path: ca.crt}]
{{- end }}
{{- end -}}

{{/* Brings a model that lies in an image where image volumes are not to be had. */}}
{{- define "tandem.initContainers" -}}
{{- $image := .Values.model.image -}}
{{- if and (eq .Values.model.source "image") (eq $image.mount "copy") -}}
initContainers:
  - name: model
    image: {{ $image.reference }}
    imagePullPolicy: {{ $image.pullPolicy }}
    command: [/bin/cp, -r, {{ $image.path | quote }}, /model/]
    securityContext:
      {{- include "tandem.containerSecurity" . | nindent 6 }}
    volumeMounts:
      - {name: model, mountPath: /model}
{{- end -}}
{{- end -}}

{{/* Options of a command line: kvMemory is --kv-memory; a switch is given when it is true. */}}
{{- define "tandem.common.options" -}}
{{- range $name, $value := . }}
{{- if not (kindIs "bool" $value) }}
- --{{ kebabcase $name }}
- {{ include "tandem.number" $value | quote }}
{{- else if $value }}
- --{{ kebabcase $name }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Whole numbers as such: YAML gives floats, which print as 1.073741824e+09. */}}
{{- define "tandem.number" -}}
{{- if and (kindIs "float64" .) (eq (float64 (int64 .)) .) -}}
{{- int64 . -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}
