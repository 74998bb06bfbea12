# A run kept going through preemptions and failures: `resume` once, `watch` until it ends. Sourced by tpu_node.sh, whose
# steps (create, install, start) it repeats; the trainer itself goes on from the newest checkpoint in its workdir.
# shellcheck shell=bash disable=SC2154

# Sets `run`: unknown (nobody answered), gone (the node), passing, running, finished, interrupted, bad_input, told (to
# end, by the machine), or failed (`ended` says how); a dry run assumes a preempted node.
look_at_run() {
  local host what code num_running=0 num_failed=0 num_told=0
  run=unknown ended=''
  look_at_node PREEMPTED || return 0
  if passing; then
    run=passing
    return
  elif [[ $state != READY ]]; then
    run=gone
    return
  fi
  local look=(gcloud compute tpus "$hosts" ssh "$name" "--worker=$workers" ${every_node[@]+"${every_node[@]}"})
  if ! ask "${look[@]}" "--command=$(status_line)" ${ssh_flags[@]+"${ssh_flags[@]}"} "${where[@]}"; then
    say "$complaint"
    return
  fi
  run=finished
  while read -r host what code; do
    case $what:$code in
      running:) num_running=$((num_running + 1)) ;;
      ended:0) ;;
      ended:"$BAD_INPUT") run=bad_input ;;
      ended:"$INTERRUPTED") [[ $run == bad_input ]] || run=interrupted ;;
      ended:"$RESTART") num_told=$((num_told + 1)) ;; # saved, or ended because another host's process did
      ended:* | lost: | none:)
        num_failed=$((num_failed + 1))
        ended="$host: $what${code:+ with exit code $code}"
        ;;
      *)
        say "no answer that is known: $host $what $code"
        run=unknown
        return
        ;;
    esac
  done <<<"$answer"
  # One process that is missing holds up all others; those that are about to end after a Ctrl-C or the last iteration
  # are still saving.
  if [[ $run == finished ]] && ((num_failed)); then
    run=failed
  elif [[ $run == finished || $run == interrupted ]] && ((num_running)); then
    run=running
  elif [[ $run == finished ]] && ((num_told)); then
    run=told
  fi
}

# Gets a run that `look_at_run` found gone or ended under way again.
recover() {
  maybe_left
  if [[ $state == READY ]]; then
    on_workers "ending what is left of the run" \
      "if test -f reinforce_ada_jax_worker.sh; then $(quoted bash reinforce_ada_jax_worker.sh kill "$name"); fi"
  else
    if [[ $state != ABSENT ]]; then
      say "$name is $state: it is deleted and made again"
      remove_node
    fi
    make_node
  fi
  install
  start
}

resume() {
  look_at_run
  case $run in
    unknown) fail "$name did not answer: try again, or look at it: $(again status)" ;;
    passing) fail "$name is $state, which goes over by itself: try again in some minutes, or use watch." ;;
    running) say "the run on $name is under way. Log: $(again logs)" ;;
    finished) say "the run on $name has finished. Delete the node when its files are safe: $(again delete)" ;;
    *) recover ;;
  esac
}

watch() {
  local failures=0 counted=false short=0 started=-$SHORT_RUN_S patience=$MAX_LOOKS code
  pack
  say "watching $name (Ctrl-C ends the watching, not the run)"
  while true; do
    look_at_run
    case $run in
      finished)
        say "the run on $name has finished. Delete the node when its files are safe: $(again delete)"
        return
        ;;
      bad_input)
        node_left
        say "error: the run on $name refused its input, and would again. See why: $(again logs)
$left"
        exit "$BAD_INPUT"
        ;;
      interrupted)
        say "the run on $name was stopped by Ctrl-C and is not started again; resume does. Delete: $(again delete)"
        exit "$INTERRUPTED"
        ;;
      running)
        patience=$MAX_LOOKS
        sleep "$poll"
        continue
        ;;
      unknown | passing)
        ((patience--)) || fail "$name: no answer, or no READY, in $MAX_LOOKS looks. See: $(again status)"
        sleep "$poll"
        continue
        ;;
      failed)
        say "the run on $name failed ($ended)"
        "$counted" || pause_before_retry
        ;;
      told)
        say "the run on $name was told to end and has saved its state; it is started again"
        "$counted" || pause_after_short_run
        ;;
      gone)
        say "$name is gone ($state)"
        "$counted" || pause_after_short_run
        ;;
    esac
    # A subshell, so that a step that fails ends the attempt and not the watching. Not in a condition: that would
    # switch off `set -e` in everything below it.
    set +e
    (
      set -e
      recover
    )
    code=$?
    set -e
    if "$dry_run"; then return "$code"; fi
    counted=false started=$SECONDS
    if ((code)); then
      say "starting $name again failed"
      pause_before_retry
      counted=true # a node without a run is what the next look will find
    fi
    patience=$MAX_LOOKS
  done
}

# Sets `pause` to --backoff, doubled for each of $1 times before this one.
set_pause() {
  pause=$((backoff << ($1 < 16 ? $1 : 16)))
  ((pause <= MAX_BACKOFF_S)) || pause=$MAX_BACKOFF_S
}

# Waits if a run ended soon after its start. Spot capacity may be taken away at once many times, so there is no limit.
pause_after_short_run() {
  local pause ran=$((SECONDS - started))
  if ((ran >= SHORT_RUN_S)); then
    short=0
    return
  fi
  set_pause "$short"
  short=$((short + 1))
  say "it ended $ran s after its start ($short short runs in a row): the next start is in $pause s. Log: $(again logs)"
  sleep "$pause"
}

# Counts one of --retries in `failures`, and waits.
pause_before_retry() {
  local pause
  set_pause "$failures"
  failures=$((failures + 1))
  if ((failures > retries)); then
    node_left
    fail "that was failure $failures, and --retries=$retries. $left"
  fi
  say "retry $failures of $retries in $pause s"
  sleep "$pause"
}
