#!/usr/bin/env bash
# Installs Tandem on a local kind cluster, and runs the checks that need a Kubernetes cluster.
#
#   deploy/kind.sh          build the image, create the cluster, install, check
#   deploy/kind.sh check    only run the checks
#   deploy/kind.sh down     remove the cluster
#
# It needs docker, kubectl, helm, and kind 0.24 or newer, whose network plugin enforces NetworkPolicies.
# TORCH_INDEX: see deploy/Dockerfile.
set -euo pipefail

cluster=tandem
namespace=tandem
release=tandem
image=tandem-llm:0.1.0
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

k() { kubectl --context "kind-$cluster" --namespace "$namespace" "$@"; }
say() { printf '\n== %s\n' "$*"; }
fail() { printf 'FAILED: %s\n' "$*" >&2; exit 1; }

need() {
  for tool in "$@"; do
    command -v "$tool" >/dev/null || fail "$tool is not installed"
  done
}

install() {
  need docker kind kubectl helm
  say "image $image"
  docker build --file "$root/deploy/Dockerfile" --target cpu \
    --build-arg "TORCH_INDEX=${TORCH_INDEX:-}" --tag "$image" "$root"
  kind get clusters | grep -qx "$cluster" || kind create cluster --name "$cluster" --wait 120s
  kind load docker-image "$image" --name "$cluster"
  say "chart"
  helm upgrade --install "$release" "$root/helm/tandem" --kube-context "kind-$cluster" \
    --namespace "$namespace" --create-namespace --values "$root/helm/examples/laptop.yaml" \
    --wait --timeout 15m
}

# The checks; each verifies a property that the tests without a cluster cannot.
check() {
  need kubectl helm
  operator=$(key operator)
  say "an upgrade keeps the generated keys"
  helm upgrade "$release" "$root/helm/tandem" --kube-context "kind-$cluster" \
    --namespace "$namespace" --reuse-values --wait --timeout 5m
  test "$(key operator)" = "$operator" || fail "the keys are others"

  say "a completion (helm test)"
  helm test "$release" --kube-context "kind-$cluster" --namespace "$namespace" --logs

  say "non-root, read-only root, no token of the API server"
  # shellcheck disable=SC2016  # The pod's shell expands the variable.
  k exec "$release-decode-0" -- sh -c '
    test "$(id -u)" = 10001
    ! touch /opt/x 2>/dev/null
    ! test -e /var/run/secrets/kubernetes.io/serviceaccount/token' || fail "confinement"

  say "scaling decode alone: 1 -> 2 -> 1"
  k scale statefulset "$release-decode" --replicas=2
  k rollout status statefulset "$release-decode" --timeout=10m
  test "$(k get statefulset "$release-prefill" -o jsonpath='{.status.replicas}')" = 1 \
    || fail "prefill was scaled, too"
  k scale statefulset "$release-decode" --replicas=1
  k wait --for=delete "pod/$release-decode-1" --timeout=90s

  say "the same by tandem scale: a router patches the scale with its own token"
  k exec "deployment/$release-router" -- env "TANDEM_API_KEY=$operator" tandem scale decode=2 --deadline 600
  test "$(k get statefulset "$release-decode" -o jsonpath='{.spec.replicas}')" = 2 || fail "patch"

  say "an upgrade keeps the size that was set"
  helm upgrade "$release" "$root/helm/tandem" --kube-context "kind-$cluster" \
    --namespace "$namespace" --reuse-values --timeout 5m
  test "$(k get statefulset "$release-decode" -o jsonpath='{.spec.replicas}')" = 2 || fail "the size is another"
  k get statefulset "$release-decode" --show-managed-fields -o jsonpath='{.metadata.managedFields[*].manager}' \
    | grep -qw tandem-size || fail "the Job before the upgrade has not taken the size over"
  k exec "deployment/$release-router" -- env "TANDEM_API_KEY=$operator" tandem scale decode=1 --deadline 120

  say "a hung engine is found, and its container started again"
  before=$(restarts)
  k exec "$release-decode-0" -- python -c '
import os, psutil, signal
psutil.Process(1).children()[0].send_signal(signal.SIGSTOP)'
  for _ in $(seq 60); do
    test "$(restarts)" -gt "$before" && break
    sleep 3
  done
  test "$(restarts)" -gt "$before" || fail "the engine hangs for 180 s and nothing came of it"
  k wait --for=condition=Ready "pod/$release-decode-0" --timeout=10m

  say "a pod that is deleted while its program loads ends at once"
  k delete pod "$release-prefill-0"
  until k get pod "$release-prefill-0" -o jsonpath='{.status.containerStatuses[0].state.running.startedAt}' \
    2>/dev/null | grep -q .; do
    sleep 0.2
  done
  began=$SECONDS
  k delete pod "$release-prefill-0"
  test $((SECONDS - began)) -lt 20 || fail "it took $((SECONDS - began)) s"
  k rollout status statefulset "$release-prefill" --timeout=10m

  say "internal ports are closed to others"
  ip=$(k get pod "$release-decode-0" -o jsonpath='{.status.podIP}')
  k run stranger --image="$image" --restart=Never --rm --attach --quiet --command -- python -c "
import socket
try:
    socket.create_connection(('$ip', 7000), 5)
except OSError as error:
    print('closed:', error)
else:
    raise SystemExit('port 7000 of a worker is open to a stranger')"

  say "the admin port is closed to others, and to strangers without a key"
  ip=$(k get pod --selector app.kubernetes.io/component=router \
    -o jsonpath='{.items[0].status.podIP}')
  k run stranger --image="$image" --restart=Never --rm --attach --quiet --command -- python -c "
import socket
try:
    socket.create_connection(('$ip', 8002), 5)
except OSError as error:
    print('closed:', error)
else:
    raise SystemExit('the admin port is open to a stranger')"
  ! k exec "deployment/$release-router" -- tandem status || fail "it needs no key"

  say "the scaler may scale the pools, and nothing else"
  account="system:serviceaccount:$namespace:$release-scaler"
  k auth can-i patch "statefulsets/$release-decode" --subresource=scale --as="$account"
  ! k auth can-i patch "statefulsets/$release-decode" --as="$account" || fail "it may patch more"
  ! k auth can-i get secrets --as="$account" || fail "it may read secrets"

  say "a router that goes finishes its streams (preStop and drain)"
  # `k` is not used, because killing a background function does not kill its kubectl.
  kubectl --context "kind-$cluster" --namespace "$namespace" \
    port-forward "service/$release-router" 18000:8000 >/dev/null &
  forward=$!
  trap 'kill "$forward" 2>/dev/null || true' EXIT
  sleep 3
  curl -sS --no-buffer http://127.0.0.1:18000/v1/completions -H 'Content-Type: application/json' \
    -H "Authorization: Bearer $(key user)" \
    -d '{"prompt": "Once upon a time", "max_tokens": 200, "stream": true}' >/tmp/tandem-stream &
  stream=$!
  sleep 1
  k rollout restart deployment "$release-router"
  wait "$stream" || fail "the stream broke"
  grep -q 'data: \[DONE\]' /tmp/tandem-stream || fail "the stream was cut off"
  say "all is well"
}

key() {
  k get secret "$release-api-keys" -o jsonpath="{.data.$1}" | base64 -d
}

restarts() {
  k get pod "$release-decode-0" -o jsonpath='{.status.containerStatuses[0].restartCount}'
}

case "${1:-up}" in
  up) install; check ;;
  check) check ;;
  down) need kind; kind delete cluster --name "$cluster" ;;
  *) fail "usage: deploy/kind.sh [up|check|down]" ;;
esac
