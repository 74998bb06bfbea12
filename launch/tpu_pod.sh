#!/usr/bin/env bash
# A training run on a TPU slice over several hosts: the same as tpu_vm.sh, on all of them. It starts one process a host
# with the same command; that they find each other through jax.distributed is the trainer's part (launch/README.md).
set -euo pipefail
script=launch/tpu_pod.sh
workers=all # what gcloud calls --worker
about='One training run on a TPU slice over several hosts: the same command on each of them. The trainer has to join its
processes for that; README.md says whether it does yet ("Runs over several hosts").'
# shellcheck source=launch/tpu_node.sh
source "$(dirname "${BASH_SOURCE[0]}")/tpu_node.sh"
main "$@"
