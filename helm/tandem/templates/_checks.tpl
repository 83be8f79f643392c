{{/* What a schema cannot say, because it looks at the pools together: root, prefill, decode. */}}
{{- define "tandem.checks" -}}
{{- $prefill := .prefill -}}
{{- $decode := .decode -}}
{{- range $option := list "dtype" "kvDtype" "numerics" "kernels" "weights" "blockSize" -}}
{{- $one := include "tandem.number" (index $prefill.options $option) -}}
{{- $other := include "tandem.number" (index $decode.options $option) -}}
{{- if ne $one $other -}}
{{- fail (printf "options.%s of prefill is %s, of decode %s: workers that differ in it cannot exchange blocks" $option $one $other) -}}
{{- end -}}
{{- end -}}
{{- if has "encode" (include "tandem.workerPools" .root | fromYamlArray) -}}
{{- $encode := include "tandem.pool" (dict "root" .root "pool" "encode") | fromYaml -}}
{{- if .root.Values.rayCluster.enabled -}}
{{- fail "encode.replicas is above 0 and rayCluster.enabled is true, and a RayCluster of this chart has no group of encode workers: set one of them off" -}}
{{- end -}}
{{- if has $encode.sizeOwner (list "hpa" "keda") -}}
{{- fail (printf "encode.sizeOwner is %s, and encode workers have none of the metrics that it follows: set chart or other" $encode.sizeOwner) -}}
{{- end -}}
{{- range $pool, $values := dict "prefill" $prefill "decode" $decode -}}
{{- if gt (int (default 1 $values.options.tensorParallel)) 1 -}}
{{- fail (printf "encode.replicas is above 0 and options.tensorParallel of %s is %v, and several ranks compute no images: set tensorParallel to 1, or encode.replicas to 0" $pool $values.options.tensorParallel) -}}
{{- end -}}
{{- if eq (toString $values.options.kernels) "triton" -}}
{{- fail (printf "encode.replicas is above 0 and options.kernels of %s is triton, and the Triton kernels compute no images: set kernels to torch, or encode.replicas to 0" $pool) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if .root.Values.models -}}
{{- range $pool := include "tandem.workerPools" .root | fromYamlArray -}}
{{- if eq (include "tandem.pool" (dict "root" $.root "pool" $pool) | fromYaml).sizeOwner "keda" -}}
{{- fail (printf "models is not empty, and the sizeOwner of %s is keda, whose query knows one model only: set chart, other or hpa" $pool) -}}
{{- end -}}
{{- $name := printf "%s-%s" (include "tandem.fullname" $.root) $pool -}}
{{- if gt (len $name) 52 -}}
{{- fail (printf "models: the StatefulSet %s would have a name of %d characters, and Kubernetes makes no pods of a StatefulSet whose name is longer than 52: choose a shorter name of the model or the release, or set fullnameOverride" $name (len $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $names := list -}}
{{- range $entry := .root.Values.models -}}
{{- if has .name $names -}}
{{- fail (printf "models: two entries have the name %s, and their pools would be the same: give each entry a name of its own" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- if or $.root.Values.rayCluster.enabled $.root.Values.gateway.enabled -}}
{{- fail "models is not empty, and rayCluster.enabled or gateway.enabled is true, and these know one model only: set them to false, or install a release for each model" -}}
{{- end -}}
{{- if and .hub (ne $.root.Values.model.source "hub") -}}
{{- fail (printf "models: %s is from the hub, and model.source is %s: all models of a release have one source; set model.source to hub, or the path of the model" .name $.root.Values.model.source) -}}
{{- end -}}
{{- if and .path (or (ne $.root.Values.model.source "pvc")) -}}
{{- fail (printf "models: %s has a path, and model.source is %s: a path is one in the claim of the first model; set model.source to pvc" .name $.root.Values.model.source) -}}
{{- end -}}
{{- if ne (empty .hub) (not (empty .path)) -}}
{{- fail (printf "models: %s needs either hub or path" .name) -}}
{{- end -}}
{{- range $pool := list (printf "%s-prefill" .name) (printf "%s-decode" .name) -}}
{{- $values := include "tandem.pool" (dict "root" $.root "pool" $pool) | fromYaml -}}
{{- if and (eq $values.sizeOwner "hpa") (not $values.hpa.metrics) -}}
{{- fail (printf "models: the sizeOwner of %s is hpa, and hpa.metrics is empty: say what the size follows" $pool) -}}
{{- end -}}
{{- if and (eq (dig "options" "autoscale" "off" $entry) "on") (ne $values.sizeOwner "other") -}}
{{- fail (printf "models: options.autoscale of %s is on, and each upgrade would set %s.replicas again: set sizeOwner to other" $entry.name $pool) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $grpc := include "tandem.grpc" .root | fromYaml -}}
{{- if and .root.Values.router.gateway.grpc.enabled (not $grpc.enabled) -}}
{{- fail "router.gateway.grpc.enabled is true and grpc.enabled is false: the route would lead nowhere" -}}
{{- end -}}
{{- if and .root.Values.gateway.enabled .root.Values.rayCluster.enabled -}}
{{- fail "gateway.enabled and rayCluster.enabled are true, and an endpoint picker knows the fronts of a StatefulSet's pods only: set one of them to false" -}}
{{- end -}}
{{- if and (eq .root.Values.router.options.autoscale "on") (not (or (include "tandem.scaleObjects" .root) (include "tandem.hasController" .root))) -}}
{{- fail "router.options.autoscale is on, and routers may set no pool's size (router.scalesPools, rbac.create, sizeOwner, rayCluster.enabled): set dry-run" -}}
{{- end -}}
{{- with .root.Values.router.options -}}
{{- if and (ne .autoscale "off") (eq (int64 .autoscaleDecodeMin) 0) (lt (float64 .holdDeadline) (float64 .autoscaleColdStart)) -}}
{{- fail (printf "router.options.autoscaleDecodeMin is 0, a worker takes %v s to come (autoscaleColdStart), and a request waits %v s for it (holdDeadline): set holdDeadline to more" .autoscaleColdStart .holdDeadline) -}}
{{- end -}}
{{- end -}}
{{- if and .root.Values.router.files.claimName .root.Values.router.options.filesUrl -}}
{{- fail "router.files.claimName and router.options.filesUrl are both set, and files have one place: leave out one of them" -}}
{{- end -}}
{{- $hook := include "tandem.upgradeHook" .root | fromYaml -}}
{{- if and $hook.surge (not (include "tandem.surgedPools" .root | fromYamlArray)) -}}
{{- fail "upgradeHook.surge is true, and the Job may add a worker to no pool (upgradeHook.enabled, rbac.create, sizeOwner, router.options.autoscale, rayCluster.enabled): set surge to false" -}}
{{- end -}}
{{- range $pool, $values := dict "prefill" $prefill "decode" $decode -}}
{{- if and (eq $.root.Values.router.options.autoscale "on") (eq $values.sizeOwner "chart") (not (include "tandem.hasController" $.root)) -}}
{{- fail (printf "router.options.autoscale is on, and each upgrade would set %s.replicas again: set %s.sizeOwner to other" $pool $pool) -}}
{{- end -}}
{{- if and (eq $values.sizeOwner "hpa") (not $values.hpa.metrics) -}}
{{- fail (printf "%s.sizeOwner is hpa, and hpa.metrics is empty: say what the size follows" $pool) -}}
{{- end -}}
{{- if and (has $values.sizeOwner (list "hpa" "keda")) $.root.Values.rayCluster.enabled -}}
{{- fail (printf "%s.sizeOwner is %s, and an HPA cannot scale a group of a RayCluster: set chart" $pool $values.sizeOwner) -}}
{{- end -}}
{{- if and (eq $values.sizeOwner "other") $.root.Values.rayCluster.enabled -}}
{{- fail (printf "%s.sizeOwner is other, and a group of a RayCluster has no scale of its own: its size is always %s.replicas; set chart" $pool $pool) -}}
{{- end -}}
{{- if eq $values.sizeOwner "keda" -}}
{{- if not $values.keda.prometheus -}}
{{- fail (printf "%s.sizeOwner is keda, and keda.prometheus is empty: say where it reads the size" $pool) -}}
{{- end -}}
{{- if eq $.root.Values.router.options.autoscale "off" -}}
{{- fail (printf "%s.sizeOwner is keda, and nobody says the size: set router.options.autoscale to dry-run" $pool) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Egress policies that would cut off what the release needs. */}}
{{- define "tandem.egressChecks" -}}
{{- $egress := .Values.networkPolicy.egress -}}
{{- if and (not .Values.redis.builtin.enabled) (not $egress.redis) -}}
{{- fail "networkPolicy.egress.enabled is true and Redis is external: name its addresses in networkPolicy.egress.redis" -}}
{{- end -}}
{{- if and (eq .Values.model.source "hub") (not $egress.hub) -}}
{{- fail "networkPolicy.egress.enabled is true and model.source is hub: name what may be reached at port 443 in networkPolicy.egress.hub" -}}
{{- end -}}
{{- if and .Values.tracing.endpoint (not $egress.more) -}}
{{- fail "networkPolicy.egress.enabled is true and tracing.endpoint is set: allow the collector in networkPolicy.egress.more" -}}
{{- end -}}
{{- if and (include "tandem.scaleObjects" .) (not $egress.apiServer) -}}
{{- fail "networkPolicy.egress.enabled is true and routers scale pools: name the API server in networkPolicy.egress.apiServer, or set router.scalesPools to false" -}}
{{- end -}}
{{- end -}}
