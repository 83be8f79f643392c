{{/* What routers, endpoint pickers and fronts share. */}}

{{/* Command line without addresses: root, options, adminHost. */}}
{{- define "tandem.routerArgs" -}}
{{- $root := .root -}}
- --model
- {{ include "tandem.model" $root | quote }}
{{- if and (eq $root.Values.model.source "hub") $root.Values.model.hub.revision }}
- --model-revision
- {{ $root.Values.model.hub.revision | quote }}
{{- end }}
- --model-impl
- {{ $root.Values.model.impl }}
{{- with $root.Values.model.servedName }}
- --served-model-name
- {{ . | quote }}
{{- end }}
{{- with include "tandem.moreModels" $root }}
- --more-models
- {{ . | quote }}
{{- end }}
- --admin-host
- {{ .adminHost | quote }}
- --admin-port
- "8002"
- --admin-grpc-port
- "8003"
{{- include "tandem.tlsArgs" $root | nindent 0 }}
{{- if include "tandem.keyRecords" $root }}
- --keys-file
- /etc/tandem/keys/{{ $root.Values.apiKeys.key }}
{{- end }}
{{- if $root.Values.apiKeys.allowAnonymous }}
# Only while there is no key: the first one that `tandem keys create` makes ends it.
- --allow-anonymous
{{- end }}
{{- include "tandem.common.options" .options | trim | nindent 0 }}
{{- end -}}

{{/* The volume with the records of API keys. */}}
{{- define "tandem.keysVolume" -}}
{{- with include "tandem.keyRecords" . -}}
- name: keys
  secret: {secretName: {{ . | quote }}}
{{- end -}}
{{- end -}}

{{- define "tandem.keysMount" -}}
{{- if include "tandem.keyRecords" . -}}
- {name: keys, mountPath: /etc/tandem/keys, readOnly: true}
{{- end -}}
{{- end -}}

{{/* The front of a decode worker, a container in its pod: root, values (the pool's). */}}
{{- define "tandem.frontContainer" -}}
{{- $root := .root -}}
{{- $front := $root.Values.gateway.front -}}
{{- $options := merge (dict "drainDeadline" .values.options.drainDeadline) $root.Values.router.options -}}
name: front
image: {{ include "tandem.image" (dict "root" $root "image" dict) }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
command: {{ include "tandem.program" "router" }}
args:
  - --front-of
  - $(POD_NAME)
  - --router-id
  - $(POD_NAME)-front
  - --host
  - 0.0.0.0
  - --api
  - http
  - --http-port
  - "8000"
  {{- include "tandem.routerArgs" (dict "root" $root "options" $options "adminHost" $root.Values.router.adminHost) | nindent 2 }}
env:
  {{- include "tandem.env" (dict "root" $root "kind" "router") | nindent 2 }}
ports:
  - {name: http, containerPort: 8000}
  - {name: admin, containerPort: 8002}
  - {name: admin-grpc, containerPort: 8003}
startupProbe:
  httpGet: {path: /started, port: http}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: {{ div $root.Values.router.startDeadline 2 }}
livenessProbe:
  httpGet: {path: /health, port: http}
  {{- include "tandem.livenessPatience" . | nindent 2 }}
readinessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 2
  {{- include "tandem.readinessPatience" . | nindent 2 }}
# The worker leaves at once, so that no picker chooses its front; the front ends after it.
lifecycle:
  preStop:
    exec: {command: [sleep, {{ $root.Values.router.preStopSleep | quote }}]}
resources:
  {{- toYaml $front.resources | nindent 2 }}
securityContext:
  {{- include "tandem.containerSecurity" $root | nindent 2 }}
volumeMounts:
  {{- include "tandem.volumeMounts" $root | nindent 2 }}
  {{- include "tandem.tlsMount" $root | replace "name: tls" "name: front-tls" | nindent 2 }}
  {{- include "tandem.keysMount" $root | nindent 2 }}
{{- end -}}

{{/* The volumes of a front, beside those of its worker. */}}
{{- define "tandem.frontVolumes" -}}
{{- include "tandem.tlsVolume" (dict "root" . "kind" "router") | replace "- name: tls" "- name: front-tls" }}
{{ include "tandem.keysVolume" . }}
{{- end -}}
