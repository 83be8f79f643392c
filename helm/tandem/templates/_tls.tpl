{{/* Certificates of routers, workers and the chart's Redis, by kind. Names as in
services/tandem/config/tls.py. */}}

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

{{- define "tandem.tlsArgs" -}}
{{- if .Values.tls.internal.enabled -}}
- --tls-dir
- /etc/tandem/tls
{{- end -}}
{{- end -}}
