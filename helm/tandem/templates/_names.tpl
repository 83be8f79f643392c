{{/* Names and labels. Parts of more than one argument take a dict with "root", the top context. */}}

{{- define "tandem.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What a component's Service and pods are selected by: root, component. */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: tandem
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* metadata of an object: root, component, name (without the release's). */}}
{{- define "tandem.metadata" -}}
name: {{ include "tandem.fullname" .root }}{{ with .name }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "tandem.labels" . | nindent 2 }}
{{- end -}}

{{/* One image over another, as YAML: base, over. A digest is of one repository and tag: who names
     another of these does not mean the digest that was there. */}}
{{- define "tandem.imageOver" -}}
{{- $image := deepCopy .base -}}
{{- if or .over.repository .over.tag (hasKey .over "digest") -}}
{{- $image = omit $image "digest" -}}
{{- end -}}
{{- toYaml (mergeOverwrite $image .over) -}}
{{- end -}}

{{/* root, image: what differs from the common one. */}}
{{- define "tandem.image" -}}
{{- $image := include "tandem.imageOver" (dict "base" .root.Values.image "over" .image) | fromYaml -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default .root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* The role of the workers of a pool: decode for the pool qwen-decode of the further model qwen. */}}
{{- define "tandem.role" -}}
{{- . | splitList "-" | last -}}
{{- end -}}

{{/* The entry of `models` that a pool belongs to, as YAML, for fromYaml: root, pool. Empty for the pools of
     the first model. `--reuse-values` of a release of an older chart has no `models`. */}}
{{- define "tandem.entry" -}}
{{- range .root.Values.models -}}
{{- if hasPrefix (printf "%s-" .name) $.pool -}}
{{- if eq $.pool (printf "%s-%s" .name (include "tandem.role" $.pool)) -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Options of a pool that fit one model only, with their defaults, as YAML, for fromYaml. */}}
{{- define "tandem.optionsOfOneModel" -}}
{{- dict "lora" "" "maxModelLen" 0 "numBlocks" 0 "speculativeConfig" "off" "kvEventsModel" "" | toYaml -}}
{{- end -}}

{{/* The values of one pool, over those of all: root, pool. The pools of a further model have the values of
     the first model's, unless its entry has others, but the defaults of options that fit one model only.
     YAML, for fromYaml. */}}
{{- define "tandem.pool" -}}
{{- $values := deepCopy .root.Values.worker -}}
{{- $role := include "tandem.role" .pool -}}
{{- $entry := include "tandem.entry" . | fromYaml -}}
{{- if eq .pool "encode" -}}
{{- /* What sizes the other pools looks at KV and tokens, which encode workers have not. */ -}}
{{- $_ := set $values "sizeOwner" "chart" -}}
{{- end -}}
{{- $ofOneModel := dict -}}
{{- if $entry -}}
{{- $_ := set $ofOneModel "options" (include "tandem.optionsOfOneModel" . | fromYaml) -}}
{{- end -}}
{{- range $over := list (index .root.Values $role) $ofOneModel (index $entry $role) -}}
{{- range $key, $value := $over -}}
{{- if and (eq $key "image") (kindIs "map" $value) -}}
{{- $_ := set $values $key (include "tandem.imageOver" (dict "base" $values.image "over" $value) | fromYaml) -}}
{{- else if and (kindIs "map" $value) (has $key (list "options" "gpu" "rdma" "sameHost" "resources" "podDisruptionBudget" "hpa" "keda" "nearPeers")) -}}
{{- range $inner, $given := $value -}}
{{- $_ := set (index $values $key) $inner $given -}}
{{- end -}}
{{- else -}}
{{- $_ := set $values $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $values -}}
{{- end -}}

{{/* The pools of workers, as a YAML list. `--reuse-values` of a release of an older chart has no encode. */}}
{{- define "tandem.workerPools" -}}
{{- $encode := default dict .Values.encode -}}
{{- $found := gt (int (default 0 $encode.replicas)) 0 | ternary (list "prefill" "decode" "encode") (list "prefill" "decode") -}}
{{- range .Values.models -}}
{{- $found = append (append $found (printf "%s-prefill" .name)) (printf "%s-decode" .name) -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* The values of --more-models of a router; empty without further models. */}}
{{- define "tandem.moreModels" -}}
{{- $entries := list -}}
{{- range $entry := .Values.models -}}
{{- $words := list (include "tandem.modelOf" (dict "root" $ "entry" $entry)) -}}
{{- $words = append $words (printf "group=%s" $entry.name) -}}
{{- $words = append $words (printf "served-model-name=%s" (default $entry.name $entry.servedName)) -}}
{{- $words = append $words (printf "model-impl=%s" $.Values.model.impl) -}}
{{- with dig "hub" "revision" "" $entry -}}
{{- $words = append $words (printf "model-revision=%s" .) -}}
{{- end -}}
{{- with include "tandem.scaleObjects" (dict "Values" $.Values "Release" $.Release "Chart" $.Chart "entry" $entry) -}}
{{- $words = append $words (printf "scale-objects=%s" .) -}}
{{- end -}}
{{- range $name, $value := $entry.options -}}
{{- $words = append $words (printf "%s=%s" (kebabcase $name) (include "tandem.number" $value)) -}}
{{- end -}}
{{- $quoted := list -}}
{{- range $words -}}
{{- $quoted = append $quoted (printf "'%s'" (replace "'" "'\\''" .)) -}}
{{- end -}}
{{- $entries = append $entries (join " " $quoted) -}}
{{- end -}}
{{- join "; " $entries -}}
{{- end -}}

{{/* What --scale-objects is: the objects whose size is a person's to set. Empty where a router may set
     no pool's: not to have a token is better, then. `entry`, if it is there, is the further model whose
     pools are meant. */}}
{{- define "tandem.scaleObjects" -}}
{{- $name := include "tandem.fullname" . -}}
{{- $group := dig "name" "" (default dict .entry) -}}
{{- $found := list -}}
{{- if and .Values.router.scalesPools .Values.rbac.create (not .Values.rayCluster.enabled) -}}
{{- range $pool := include "tandem.workerPools" . | fromYamlArray -}}
{{- $values := include "tandem.pool" (dict "root" $ "pool" $pool) | fromYaml -}}
{{- $entry := include "tandem.entry" (dict "root" $ "pool" $pool) | fromYaml -}}
{{- if and (has $values.sizeOwner (list "chart" "other")) (eq $group (dig "name" "" $entry)) -}}
{{- $found = append $found (printf "%s=statefulsets/%s-%s" (include "tandem.role" $pool) $name $pool) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $found $group -}}
{{- join "," $found -}}
{{- else if $found -}}
{{- append $found (printf "router=deployments/%s-router" $name) | join "," -}}
{{- end -}}
{{- end -}}

{{/* Whether the pool controller runs the workers, in pods that Ray's autoscaler adds and removes. */}}
{{- define "tandem.hasController" -}}
{{- if and .Values.rayCluster.enabled .Values.rayCluster.autoscaling.enabled -}}true{{- end -}}
{{- end -}}

{{/* The Secret that holds one of our secrets: root, existing (its name or empty), name. */}}
{{- define "tandem.secretName" -}}
{{- .existing | default (printf "%s-%s" (include "tandem.fullname" .root) .name) -}}
{{- end -}}

{{/* Whether the chart makes API keys. */}}
{{- define "tandem.makesKeys" -}}
{{- if not (or .Values.apiKeys.existingSecret .Values.apiKeys.allowAnonymous) -}}true{{- end -}}
{{- end -}}

{{/* The Secret with the records of keys that routers read; empty if there is none. */}}
{{- define "tandem.keyRecords" -}}
{{- if include "tandem.makesKeys" . -}}
{{- printf "%s-key-records" (include "tandem.fullname" .) -}}
{{- else -}}
{{- .Values.apiKeys.existingSecret -}}
{{- end -}}
{{- end -}}

{{/* The Secret with the texts of keys that this release itself sends; empty if there is none. */}}
{{- define "tandem.keyTexts" -}}
{{- if include "tandem.makesKeys" . -}}
{{- printf "%s-api-keys" (include "tandem.fullname" .) -}}
{{- else -}}
{{- .Values.apiKeys.textsSecret -}}
{{- end -}}
{{- end -}}

{{/* The annotation of an object whose size the chart sets: the value that it was last told. */}}
{{- define "tandem.toldReplicas" -}}tandem.dev/replicas{{- end -}}

{{/* The values of the Job before an upgrade, as YAML, for fromYaml. `--reuse-values` of a release of an
     older chart has none: the defaults are those of values.yaml. */}}
{{- define "tandem.upgradeHook" -}}
{{- $requests := dict "cpu" "50m" "memory" "96Mi" -}}
{{- $resources := dict "requests" $requests "limits" (dict "memory" "256Mi") -}}
{{- $values := dict "enabled" true "surge" false "surgeDeadline" 240 "resources" $resources -}}
{{- range $key, $value := .Values.upgradeHook -}}
{{- $_ := set $values $key $value -}}
{{- end -}}
{{- toYaml $values -}}
{{- end -}}

{{/* The values of the gRPC replicas, as YAML, for fromYaml. `--reuse-values` of a release of an older chart
     has none: the defaults are those of values.yaml. */}}
{{- define "tandem.grpc" -}}
{{- $resources := dict "requests" (dict "cpu" "500m" "memory" "512Mi") "limits" (dict "memory" "2Gi") -}}
{{- $budget := dict "enabled" true "maxUnavailable" 1 -}}
{{- $service := dict "type" "ClusterIP" "annotations" dict -}}
{{- $values := dict "enabled" true "replicas" 1 "service" $service "resources" $resources "podDisruptionBudget" $budget -}}
{{- range $key, $value := .Values.grpc -}}
{{- $_ := set $values $key $value -}}
{{- end -}}
{{- toYaml $values -}}
{{- end -}}

{{/* The components that are routers of clients, as a YAML list. */}}
{{- define "tandem.routers" -}}
{{- $grpc := include "tandem.grpc" . | fromYaml -}}
{{- $grpc.enabled | ternary (list "router" "grpc") (list "router") | toYaml -}}
{{- end -}}

{{/* Whether a Job takes over the sizes before an upgrade, and gives them changed values of `replicas`. */}}
{{- define "tandem.keepsSizes" -}}
{{- $hook := include "tandem.upgradeHook" . | fromYaml -}}
{{- if and $hook.enabled .Values.rbac.create -}}true{{- end -}}
{{- end -}}

{{/* Pools to which a Job adds a worker for the time of an upgrade, if they have one, as RESOURCE/NAME; a list
     in YAML. Who sets their size otherwise would take the worker back at once. */}}
{{- define "tandem.surgedPools" -}}
{{- $hook := include "tandem.upgradeHook" . | fromYaml -}}
{{- $found := list -}}
{{- if and $hook.surge (include "tandem.keepsSizes" .) (not .Values.rayCluster.enabled) -}}
{{- range $pool := without (include "tandem.workerPools" . | fromYamlArray) "encode" -}}
{{- $values := include "tandem.pool" (dict "root" $ "pool" $pool) | fromYaml -}}
{{- $entry := include "tandem.entry" (dict "root" $ "pool" $pool) | fromYaml -}}
{{- $autoscale := empty $entry | ternary $.Values.router.options.autoscale (dig "options" "autoscale" "off" $entry) -}}
{{- if and (has $values.sizeOwner (list "chart" "other")) (ne $autoscale "on") -}}
{{- $found = append $found (printf "statefulsets/%s-%s" (include "tandem.fullname" $) $pool) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* The number of replicas of an object: root, kind, component, replicas, sizeOwner. Empty: not stated.
     A size that somebody set by the scale is not stated, if the chart is applied by the server and the Job
     before the upgrade has taken the size over: the field has an owner. Else an upgrade states the size
     that is there, because a field that is left out falls back to 1; only a changed value of `replicas`
     replaces it. A release of a chart that did not note the value keeps a size that somebody set by the
     scale. Nor is a size of 1 stated to which a Job has added a worker. The Job has the same rule (services/tandem/router/scaling/kubernetes/keep_sizes.py). */}}
{{- define "tandem.replicas" -}}
{{- $name := printf "%s-%s" (include "tandem.fullname" .root) .component -}}
{{- $live := lookup "apps/v1" .kind .root.Release.Namespace $name -}}
{{- $told := dig "metadata" "annotations" (include "tandem.toldReplicas" .) "" $live -}}
{{- $isScaled := false -}}
{{- $isApplied := false -}}
{{- range dig "metadata" "managedFields" list $live -}}
{{- if and (eq .operation "Apply") (not .subresource) -}}
{{- $isApplied = true -}}
{{- end -}}
{{- if and (eq (default "" .subresource) "scale") (hasKey (dig "fieldsV1" "f:spec" dict .) "f:replicas") -}}
{{- $isScaled = true -}}
{{- end -}}
{{- end -}}
{{- $size := "" -}}
{{- if and $live (or (ne .sizeOwner "chart") (eq $told (toString .replicas)) (and $isScaled (not $told))) -}}
{{- $size = toString $live.spec.replicas -}}
{{- else if eq .sizeOwner "chart" -}}
{{- $size = toString .replicas -}}
{{- end -}}
{{- $surged := include "tandem.surgedPools" .root | fromYamlArray -}}
{{- $isSurged := and (eq $size "1") (has (printf "statefulsets/%s" $name) $surged) -}}
{{- if not (and $live (or $isScaled $isSurged) $isApplied (include "tandem.keepsSizes" .root)) -}}
{{- $size -}}
{{- end -}}
{{- end -}}
