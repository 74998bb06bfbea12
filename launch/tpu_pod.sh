#!/usr/bin/env bash
# A training run on a TPU slice over several hosts, or on several slices: the same as tpu_vm.sh, on all hosts. It starts
# one process a host with the same command; --distributed has them find each other.
set -euo pipefail
script=launch/tpu_pod.sh
workers=all # what gcloud calls --worker
member=--distributed
about='One training run on a TPU slice over several hosts, or on several slices: the same command on each host.'
# shellcheck source=launch/tpu_node.sh
source "$(dirname "${BASH_SOURCE[0]}")/tpu_node.sh"
main "$@"
