{{/* Certificates of routers, workers and the chart's Redis, by kind. Names as in
services/tandem/common/config/tls.py. */}}

{{/* The DNS name in the certificates of one kind: root, kind. */}}
{{- define "tandem.certificateName" -}}
{{- printf "%s.%s.%s.tandem" .kind .root.Release.Namespace (include "tandem.fullname" .root) | lower -}}
{{- end -}}

{{/* All DNS names in the certificates of one kind, as JSON: root, kind. Clients of Redis look for its
Service. */}}
{{- define "tandem.certificateNames" -}}
{{- $names := list (include "tandem.certificateName" .) -}}
{{- if eq .kind "redis" -}}
{{- $names = append $names (printf "%s-redis" (include "tandem.fullname" .root)) -}}
{{- end -}}
{{- toJson $names -}}
{{- end -}}

{{/* The Secret with ca.crt, tls.crt and tls.key: root, kind. */}}
{{- define "tandem.tlsSecret" -}}
{{- $existing := index .root.Values.tls.internal.existingSecrets .kind -}}
{{- default (printf "%s-tls-%s" (include "tandem.fullname" .root) .kind) $existing -}}
{{- end -}}

{{- define "tandem.tlsVolume" -}}
{{- $internal := .root.Values.tls.internal -}}
{{- if $internal.enabled -}}
- name: tls
  projected:
    defaultMode: 0440
    sources:
      - secret:
          name: {{ include "tandem.tlsSecret" . }}
          items:
            - {key: tls.crt, path: tls.crt}
            - {key: tls.key, path: tls.key}
            {{- if not $internal.roots.configMap }}
            - {key: ca.crt, path: ca.crt}
            {{- end }}
      {{- with $internal.roots }}
      {{- if .configMap }}
      - configMap:
          name: {{ .configMap }}
          items: [{key: {{ .key }}, path: ca.crt}]
      {{- end }}
      {{- end }}
{{- end -}}
{{- end -}}

{{- define "tandem.tlsMount" -}}
{{- if .Values.tls.internal.enabled -}}
- {name: tls, mountPath: /etc/tandem/tls, readOnly: true}
{{- end -}}
{{- end -}}

{{/* Ray's TLS. Ray checks the address of a peer, so each pod makes its own certificate when it starts, from
     an authority that signs for Ray alone. Whoever has Ray's token may run code in these pods anyway. */}}
{{- define "tandem.hasRayTls" -}}
{{- if and .Values.tls.internal.enabled (or .Values.ray.head.enabled .Values.rayCluster.enabled) -}}true{{- end -}}
{{- end -}}

{{/* The Secret of your own with Ray's authority; empty: the chart makes one. `--reuse-values` of a release of
     an older chart has no `ray.authority`. */}}
{{- define "tandem.ownRayAuthority" -}}
{{- (.Values.ray.authority | default dict).existingSecret | default "" -}}
{{- end -}}

{{- define "tandem.rayTlsEnv" -}}
{{- if include "tandem.hasRayTls" . -}}
- {name: RAY_USE_TLS, value: "1"}
- {name: RAY_TLS_SERVER_CERT, value: /etc/tandem/ray/tls/tls.crt}
- {name: RAY_TLS_SERVER_KEY, value: /etc/tandem/ray/tls/tls.key}
- {name: RAY_TLS_CA_CERT, value: /etc/tandem/ray/tls/ca.crt}
{{- end -}}
{{- end -}}

{{- define "tandem.rayTlsMount" -}}
{{- if include "tandem.hasRayTls" . -}}
- {name: ray-tls, mountPath: /etc/tandem/ray, readOnly: true}
{{- end -}}
{{- end -}}

{{- define "tandem.rayTlsVolumes" -}}
{{- if include "tandem.hasRayTls" . -}}
- name: ray-authority
  secret:
    secretName: {{ include "tandem.secretName" (dict "root" . "existing" (include "tandem.ownRayAuthority" .) "name" "ray-authority") }}
    defaultMode: 0440
    items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
- name: ray-tls
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- end -}}
{{- end -}}

{{/* The init container that makes the certificate of a pod's Ray: root, image (what differs from the common one). */}}
{{- define "tandem.rayCertificate" -}}
{{- if include "tandem.hasRayTls" .root -}}
- name: ray-certificate
  image: {{ include "tandem.image" . }}
  imagePullPolicy: {{ default .root.Values.image.pullPolicy .image.pullPolicy }}
  command: [python, -m, tandem.cluster.launch.pod_certificate]
  args: [/etc/tandem/ray-authority, /etc/tandem/ray/tls, $(POD_IP), {{ include "tandem.fullname" .root }}-ray]
  env:
    - name: POD_IP
      valueFrom: {fieldRef: {fieldPath: status.podIP}}
  resources:
    requests: {cpu: 50m, memory: 64Mi}
    limits: {memory: 256Mi}
  securityContext:
    {{- include "tandem.containerSecurity" .root | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: ray-authority, mountPath: /etc/tandem/ray-authority, readOnly: true}
    - {name: ray-tls, mountPath: /etc/tandem/ray}
{{- end -}}
{{- end -}}

{{- define "tandem.tlsArgs" -}}
{{- if .Values.tls.internal.enabled -}}
- --tls-dir
- /etc/tandem/tls
{{- end -}}
{{- end -}}
