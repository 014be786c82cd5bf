#!/usr/bin/env bash
# The suite that CI requires without a GPU, in three parts: unit tests side by side, a file to a worker; whole processes,
# which need the cores for themselves; the real control plane, which moves into a network namespace. Says what was left
# out and why; with CI=true a kube, engine or e2e test that is skipped is a failure.
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1
started=$SECONDS
failed=0
workers=$(nproc)

"$python" -m pytest --durations=10 --numprocesses $((workers < 4 ? workers : 4)) --dist loadfile \
  -m "not kube and not node" --ignore=tests/e2e tests || failed=1
echo
"$python" -m pytest --durations=10 tests/e2e || failed=1
echo
if command -v go >/dev/null || [ -n "${KUBEBUILDER_ASSETS:-}" ] || [ -n "${PACELINE_TEST_KUBECONFIG:-}" ]; then
  "$python" -m pytest --durations=10 -m kube tests/kube || failed=1
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
