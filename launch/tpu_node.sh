# One training run on one TPU node, or on several slices, from creating it to deleting it: what tpu_vm.sh and tpu_pod.sh
# share. They set `script`, `workers` and `about`, source this file and call `main`. What happens on the hosts is in
# worker.sh.
#
# Whatever has an effect goes through `call`, so --dry-run shows just what would be run: commands on stdout, one a line;
# everything else that is said goes to stderr. Bash 3.2 (macOS) is enough: no mapfile, and empty arrays are guarded.
# shellcheck shell=bash disable=SC2154

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly FAILED=1 BAD_USAGE=2 # exit codes of these scripts
# Exit codes from the hosts: worker.sh (RUNNING), reinforce_ada_jax/cli.py (the others).
readonly RUNNING=3 BAD_INPUT=2 INTERRUPTED=130 RESTART=75
readonly MAX_LOOKS=60        # how often a state that should pass, or a node that can't be reached, is looked at
readonly MAX_BACKOFF_S=600 SHORT_RUN_S=600 # a run that ends sooner is not started again at once

# shellcheck source=launch/flags.sh
source "$root/launch/flags.sh"
# shellcheck source=launch/watch.sh
source "$root/launch/watch.sh"

# ---- words -----------------------------------------------------------------------------------------------------------

say() { printf '%s\n' "$*" >&2; }

fail() {
  say "error: $*"
  exit "$FAILED"
}

refuse() {
  say "error: $*"
  exit "$BAD_USAGE"
}

# The words of a command so that a shell reads them as they are.
quoted() {
  local line
  printf -v line '%q ' "$@"
  printf '%s' "${line% }"
}

# This script's command line for another command on the same node.
again() {
  local line=("$script" "$1" "--name=$name" "${where[@]}")
  if ((slices > 1)); then
    line+=("--slices=$slices")
  elif "$queued"; then
    line+=(--queued)
  fi
  local flag
  for flag in ${ssh_flags[@]+"${ssh_flags[@]}"}; do line+=("--ssh-flag=$flag"); done
  quoted "${line[@]}"
}

# ---- running things --------------------------------------------------------------------------------------------------

# call STEP COMMAND...: runs the command; its failure ends the script with the step's name and what is left behind.
call() {
  local step=$1 code=0
  shift
  if "$dry_run"; then
    quoted "$@"
    echo
    return
  fi
  "$@" </dev/null || code=$?
  ((code == 0)) || fail_step "$step" "$code"
}

fail_step() { # STEP CODE [WHY]
  if (($2 == RUNNING)); then
    fail "$1: a run is under way on $name. Attach to it:
  $(quoted gcloud compute tpus "$hosts" ssh "$name" "${where[@]}" "--worker=$worker" ${one_node[@]+"${one_node[@]}"} \
    ${ssh_flags[@]+"${ssh_flags[@]}"}) -- -t tmux attach -t $name
or follow its log: $(again logs)
or end it: $(again stop)"
  fi
  fail "$1 failed (exit code $2): ${3:-the lines above say why.}
$left"
}

# What a failure leaves behind, from the step on that may have made something.
nothing_left() { left="Nothing was made."; }
maybe_left() { left="$name may exist, and then costs. See: $(again status)   Delete: $(again delete)"; }
node_left() { left="$name exists, and costs until deleted: $(again delete)"; }

tpu() { # STEP GROUP VERB ARGUMENTS...
  call "$1" gcloud compute tpus "${@:2}" "${where[@]}"
}

on_workers() { # STEP COMMAND_LINE
  tpu "$1" "$hosts" ssh "$name" "--worker=$workers" ${every_node[@]+"${every_node[@]}"} "--command=$2" \
    ${ssh_flags[@]+"${ssh_flags[@]}"}
}

# ask COMMAND...: its stdout in `answer`, its stderr in `complaint`.
ask() {
  local code=0
  mkdir -p "$scratch"
  answer=$("$@" </dev/null 2>"$scratch/stderr") || code=$?
  complaint=$(<"$scratch/stderr")
  return "$code"
}

# ---- the node --------------------------------------------------------------------------------------------------------

# Sets `state` (READY, PREEMPTED, ..., ABSENT) and `num_workers`; in a dry run to what the caller assumes.
look_at_node() { # ASSUMED_STATE
  if ((slices > 1)); then
    look_at_slices "$1"
    return
  fi
  local look=(gcloud compute tpus tpu-vm describe "$name" "${where[@]}" "--format=value(state,networkEndpoints.len())")
  num_workers=''
  if "$dry_run"; then
    call look "${look[@]}"
    state=$1
  elif ask "${look[@]}"; then
    read -r state num_workers <<<"$answer"
  elif [[ $complaint == *NOT_FOUND* ]]; then
    state=ABSENT
  else
    say "$complaint"
    return 1
  fi
}

# Several slices have the state of their queued resource: READY with all of them, ABSENT before the first.
look_at_slices() { # ASSUMED_STATE
  local assumed=$1
  [[ $1 != READY ]] || assumed=ACTIVE
  ask_queue "$assumed" || return 1
  case $queue_state in
    ACTIVE) state=READY ;;
    ACCEPTED | WAITING_FOR_RESOURCES | PROVISIONING) state=ABSENT ;; # it keeps its place
    SUSPENDING) state=STOPPING ;;
    *) state=$queue_state ;;
  esac
}

look_at_queue() { # ASSUMED_STATE; sets `queue_state`
  ask_queue "$1" || fail_step "looking at the queued resource" 1
}

ask_queue() { # ASSUMED_STATE
  local look=(gcloud compute tpus queued-resources describe "$name" "${where[@]}" "--format=value(state.state)")
  if "$dry_run"; then
    call look "${look[@]}"
    queue_state=$1
  elif ask "${look[@]}"; then
    queue_state=$answer
  elif [[ $complaint == *NOT_FOUND* ]]; then
    queue_state=ABSENT
  else
    say "$complaint"
    return 1
  fi
}

passing() { # whether the node's state is one that goes over by itself
  case $state in
    CREATING | STARTING | RESTARTING | REIMAGING | REPAIRING | STOPPING | DELETING | HIDING | UNHIDING) return 0 ;;
    *) return 1 ;;
  esac
}

create() {
  nothing_left
  look_at_node ABSENT || fail_step "looking for $name" 1
  if [[ $state == READY ]]; then
    say "$name is there already, and is taken as it is."
    node_left
    check_num_workers
  elif [[ $state == ABSENT ]]; then
    make_node
  elif passing; then
    node_left
    wait_until_ready
  else
    fail "$name is $state and can't be taken as it is. Delete it: $(again delete)   Or let resume make it again."
  fi
}

make_node() {
  maybe_left
  if "$queued"; then
    queue_up
  else
    create_through tpu-vm create "$name" "--accelerator-type=$type" "--version=$version"
  fi
  node_left
  wait_until_ready
}

create_through() { # ARGUMENTS...
  local code=0 line
  line=(gcloud compute tpus "$@" "${where[@]}")
  if "$spot"; then line+=(--spot); fi
  line+=(${create_flags[@]+"${create_flags[@]}"})
  say "creating $name ($( ((slices == 1)) || echo "$slices x ")$type, $version)"
  if "$dry_run"; then
    call create "${line[@]}"
    return
  fi
  ask "${line[@]}" || code=$?
  say "$complaint"
  ((code == 0)) || fail_step create "$code" "$(remedy)"
}

# What to do about gcloud's complaint; the messages have no codes of their own to go by.
remedy() {
  case $complaint in
    *[Qq]uota*) echo "the project's quota for $type in $zone is too small. Ask for more
(https://console.cloud.google.com/iam-admin/quotas), or take another --type, another --zone, or --spot." ;;
    *capacity* | *RESOURCE_EXHAUSTED* | *stockout*) echo "$zone has no $type free now. --queued waits for one;
or take another --zone or --type." ;;
    *SERVICE_DISABLED* | *"has not been used"*) echo "the API is off. Run: gcloud services enable tpu.googleapis.com" ;;
    *PERMISSION_DENIED*) echo "your account may not. It needs the role roles/tpu.admin in this project." ;;
    *"not found in zone"* | *INVALID_ARGUMENT*) echo "check --type=$type, --version=$version and --zone=$zone:
gcloud compute tpus accelerator-types list --zone=$zone and gcloud compute tpus tpu-vm versions list --zone=$zone" ;;
    *) echo "gcloud's own words are above." ;;
  esac
}

queue_up() {
  local looks=0
  look_at_queue ABSENT
  if [[ $queue_state == FAILED || $queue_state == SUSPENDED ]]; then
    say "the queued resource $name is $queue_state: it is deleted and requested again"
    tpu "delete" queued-resources delete "$name" --force --quiet
    queue_state=ABSENT
  fi
  if [[ $queue_state == ABSENT ]]; then
    local named=("--node-id=$name")
    if ((slices > 1)); then named=("--node-count=$slices" "--node-prefix=$name"); fi
    create_through queued-resources create "$name" "${named[@]}" "--accelerator-type=$type" "--runtime-version=$version"
  fi
  while look_at_queue ACTIVE && [[ $queue_state != ACTIVE ]]; do
    case $queue_state in
      FAILED | SUSPENDING | SUSPENDED | DELETING | ABSENT)
        fail "the queued resource $name is $queue_state. See why:
  $(quoted gcloud compute tpus queued-resources describe "$name" "${where[@]}")
Delete it: $(again delete)"
        ;;
    esac
    # There is no limit: a place in the queue costs nothing and may take days. Ctrl-C leaves it in the queue.
    ((looks++)) || say "waiting for capacity (Ctrl-C keeps the place in the queue; the same command goes on waiting)"
    sleep "$poll"
  done
}

wait_until_ready() {
  local looks
  for ((looks = 0; looks < MAX_LOOKS; looks++)); do
    look_at_node READY || fail_step "looking at $name" 1
    if [[ $state == READY ]]; then
      check_num_workers
      return
    fi
    passing || fail "$name became $state instead of READY. $left"
    sleep "$poll"
  done
  fail "$name is still $state after $MAX_LOOKS looks. $left"
}

check_num_workers() {
  if [[ $workers != all && -n $num_workers ]] && ((num_workers > 1)); then
    fail "$name has $num_workers hosts, and $script starts a process on one: use launch/tpu_pod.sh. $left"
  fi
}

remove_node() {
  if "$queued"; then
    tpu "delete" queued-resources delete "$name" --force --quiet
  else
    tpu "delete" tpu-vm delete "$name" --quiet
  fi
}

# ---- the code and the run --------------------------------------------------------------------------------------------

# The code as an archive, once a call of this script: what `watch` restarts is what it began with.
pack() {
  "${packed:-false}" && return
  nothing_left
  files=("$scratch/reinforce_ada_jax.tar.gz")
  call "packing the code" mkdir -p "$scratch"
  # shellcheck disable=SC2016  # expanded by the bash that runs it
  local from_stash='commit=$(git -C "$1" stash create) &&
git -C "$1" archive --format=tar.gz --output="$2" "${commit:-HEAD}"'
  if "$dirty"; then
    call "packing the code" bash -c "$from_stash" pack "$root" "${files[0]}"
  else
    call "packing the code" git -C "$root" archive --format=tar.gz "--output=${files[0]}" HEAD
  fi
  if [[ -n $setup ]]; then
    files+=("$scratch/reinforce_ada_jax_setup.sh")
    call "packing the code" cp "$setup" "${files[1]}"
  fi
  packed=true
}

install() {
  pack
  node_left
  say "copying the code"
  tpu "copying the code" "$hosts" scp "${files[@]}" "$name:" "--worker=$workers" \
    ${every_node[@]+"${every_node[@]}"} ${ssh_flags[@]+"${ssh_flags[@]}"}
  say "installing (minutes, the first time)"
  # Under another name until it has seen that no run is under way: bash reads the script of a run while that runs.
  on_workers install "tar -xzOf reinforce_ada_jax.tar.gz launch/worker.sh >reinforce_ada_jax_new_worker.sh && $(
    quoted bash reinforce_ada_jax_new_worker.sh install "$name" "$python" "${setup:+setup}"
  )"
}

start() {
  node_left
  say "starting"
  on_workers start "$(
    quoted bash reinforce_ada_jax_worker.sh start "$name" ${variables[@]+env "${variables[@]}"} \
      .venv/bin/python -m reinforce_ada_jax.train ${member:+"$member"} "--config=$config" "--workdir=$workdir" \
      ${trainer_flags[@]+"${trainer_flags[@]}"}
  )"
  say "started on $name. Log: $(again logs)   Delete when done: $(again delete)"
}

logs() {
  node_left
  say "Ctrl-C ends the log, not the run."
  tpu logs "$hosts" ssh "$name" "--worker=$worker" ${one_node[@]+"${one_node[@]}"} \
    "--command=$(quoted bash reinforce_ada_jax_worker.sh logs "$name")" ${ssh_flags[@]+"${ssh_flags[@]}"}
}

stop() {
  node_left
  on_workers stop "$(quoted bash reinforce_ada_jax_worker.sh stop "$name")"
}

status_line() {
  # shellcheck disable=SC2016  # expanded on the host
  echo "if test -f reinforce_ada_jax_worker.sh; then $(quoted bash reinforce_ada_jax_worker.sh status "$name");" \
    'else echo "$(hostname) none"; fi'
}

status() {
  nothing_left
  if "$queued" && ((slices == 1)); then look_at_queue ACTIVE; fi
  look_at_node READY || fail_step "looking at $name" 1
  if ! "$dry_run"; then
    if "$queued"; then echo "queued resource $name: $queue_state"; fi
    if ((slices == 1)); then echo "node $name: $state"; fi
  fi
  [[ $state != READY ]] || on_workers status "$(status_line)"
}

delete() {
  local word
  if ! "$yes" && ! "$dry_run"; then
    printf 'Delete %s in %s, with its disk? [y/N] ' "$name" "$zone" >&2
    read -r word || word=''
    [[ $word == y || $word == yes ]] || fail "$name was not deleted: answer y, or add --yes."
  fi
  maybe_left
  remove_node
  say "$name is deleted."
}

# ---- start -----------------------------------------------------------------------------------------------------------

main() {
  parse "$@"
  check_flags
  scratch=$root/runs/launch/$name # the archive, and gcloud's last complaint; runs/ is not tracked
  case $action in
    up)
      pack
      create
      install
      start
      logs
      ;;
    *) "$action" ;;
  esac
}
