#!/usr/bin/env bash
# The suite that CI requires without a GPU, in three parts, each side by side with a file to a worker: unit tests; whole
# processes; the real control plane, one for each worker, in a network namespace of its own.
# Says what was left out and why; with CI=true a kube, native, engine or e2e test that is skipped is a failure.
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1
started=$SECONDS
failed=0
workers=$(nproc)
pair=$((workers < 2 ? 1 : 2)) # Tests that start several processes each.

# The files that take longest come first, so that no worker is left alone with one at the end.
"$python" -m pytest --durations=10 --numprocesses $((workers < 4 ? workers : 4)) \
  --dist loadfile --no-loadscope-reorder --ignore=tests/e2e --ignore=tests/kube \
  tests/unit/engine/model/test_smollm2.py tests || failed=1
echo
"$python" -m pytest --durations=10 --numprocesses $pair --dist loadfile tests/e2e || failed=1
echo
if command -v go >/dev/null || [ -n "${KUBEBUILDER_ASSETS:-}" ] || [ -n "${PACELINE_TEST_KUBECONFIG:-}" ]; then
  [ -z "${PACELINE_TEST_KUBECONFIG:-}" ] || pair=1 # A cluster of somebody else's is one, and its CRDs are shared.
  "$python" -m pytest --durations=10 --numprocesses $pair --dist loadfile --no-loadscope-reorder -m kube \
    tests/kube/test_operator_objects.py tests/kube/test_operator_pods.py tests/kube || failed=1
elif [[ "${CI:-}" =~ ^(1|true)$ ]]; then
  echo "kube tests: neither Go nor KUBEBUILDER_ASSETS is here, and CI must not skip them" >&2
  failed=1
else
  echo "kube tests: skipped, for neither Go (1.26, builds the control plane) nor KUBEBUILDER_ASSETS is here"
fi
mkdir -p .build/measured
echo "{\"seconds\": $((SECONDS - started)), \"failed\": $failed}" >.build/measured/test.json
echo "total time: $((SECONDS - started)) s"
exit $failed
