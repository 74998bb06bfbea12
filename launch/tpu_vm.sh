#!/usr/bin/env bash
# A training run on one TPU VM, the slices whose chips all hang on one host: v5litepod-1 to -8, v6e-1 to -8, v5p-8, v4-8.
set -euo pipefail
script=launch/tpu_vm.sh
workers=0 # what gcloud calls --worker
member='' # of several processes
about='One training run on one TPU VM (a slice on one host; for several hosts: launch/tpu_pod.sh).'
# shellcheck source=launch/tpu_node.sh
source "$(dirname "${BASH_SOURCE[0]}")/tpu_node.sh"
main "$@"
