#!/usr/bin/env bash
# What happens on a host of the TPU. tpu_node.sh brings this file there with the code and calls it through ssh:
#
#   install NAME PYTHON SETUP   unpack the code, run the user's setup file, make the environment
#   start NAME COMMAND...       the command in a tmux session called NAME
#   run NAME                    what that session executes
#   status NAME                 one line: "HOST running", "HOST ended EXIT_CODE", "HOST lost" or "HOST none"
#   logs NAME                   the log, until the run ends
#   stop NAME                   Ctrl-C, and wait for the state to be saved
#   kill NAME                   end it at once
#
# Everything lies in the home folder: the code in ~/reinforce_ada_jax with its .venv, and in ~/reinforce_ada_jax_run the
# command, its log and its exit code. One run at a time: a process that uses a TPU has it to itself.
set -euo pipefail

readonly RUNNING=3 # exit code: refused, because a run is under way (tpu_node.sh says how to attach)
archive=$HOME/reinforce_ada_jax.tar.gz
source_dir=$HOME/reinforce_ada_jax
run_dir=$HOME/reinforce_ada_jax_run
stop_grace_s=600 # an iteration's save takes seconds to minutes

fail() {
  printf 'error: %s: %s\n' "$(hostname)" "$*" >&2
  exit 1
}

running() {
  tmux has-session -t "=$name" 2>/dev/null
}

refuse_while_running() {
  if running; then
    printf 'error: %s: the run %s is under way.\n' "$(hostname)" "$name" >&2
    exit "$RUNNING"
  fi
}

# ---- install ---------------------------------------------------------------------------------------------------------

install_all() { # PYTHON ("" for the newest there is) SETUP ("setup" or "")
  refuse_while_running
  mv "$HOME/reinforce_ada_jax_new_worker.sh" "$HOME/reinforce_ada_jax_worker.sh"
  unpack
  if [[ $2 == setup ]]; then
    (cd "$source_dir" && bash "$HOME/reinforce_ada_jax_setup.sh") || fail "the setup file failed (exit code $?)."
  fi
  command -v tmux >/dev/null || fail "tmux is missing. Put 'sudo apt-get install -y tmux' into the --setup file."
  find_python "$1"
  install_packages
}

unpack() {
  # What the last installation brought goes first, so that no deleted module stays importable. What is not from an
  # archive (.venv, runs, models) stays.
  mkdir -p "$source_dir"
  if [[ -f $source_dir/.installed_files ]]; then
    while IFS= read -r file; do rm -f "${source_dir:?}/$file"; done <"$source_dir/.installed_files"
  fi
  tar -xzf "$archive" -C "$source_dir"
  tar -tzf "$archive" | grep -v '/$' >"$source_dir/.installed_files"
}

find_python() { # sets python
  local candidate candidates=("$1")
  if [[ -z $1 ]]; then candidates=(python3.13 python3.12 python3.11 python3); fi
  for candidate in "${candidates[@]}"; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      python=$candidate
      return
    fi
  done
  fail "Python 3.11 or newer is needed; ${1:-python3} is $("${1:-python3}" --version 2>&1 || true)." \
    "Put its installation into the --setup file: launch/README.md has one that does."
}

install_packages() {
  cd "$source_dir"
  [[ -x .venv/bin/python ]] || "$python" -m venv .venv ||
    fail "$python can't make an environment. On Ubuntu: sudo apt-get install -y $python-venv, in the --setup file."
  local pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check) jax_version
  jax_version=$(sed -n 's/^jax==//p' requirements.txt)
  [[ -n $jax_version ]] || fail "requirements.txt has no line jax==VERSION."
  "${pip[@]}" --no-deps -r requirements.txt -r requirements-gcs.txt
  # The extra brings libtpu; what is pinned already stays as it is.
  "${pip[@]}" --constraint requirements.txt "jax[tpu]==$jax_version"
  "${pip[@]}" --no-deps --no-build-isolation --editable .
}

# ---- a run -----------------------------------------------------------------------------------------------------------

start() { # COMMAND...
  refuse_while_running
  [[ -x $source_dir/.venv/bin/python ]] || fail "nothing is installed here: install first."
  mkdir -p "$run_dir"
  rm -f "$run_dir/exit_code"
  # A file, not an argument: tmux reads arguments by rules of its own (a last ';' is a separator).
  printf '%q ' "$@" >"$run_dir/command"
  tmux new-session -d -s "$name" bash "$HOME/reinforce_ada_jax_worker.sh" run "$name"
}

run() {
  local codes
  cd "$source_dir"
  trap : INT # Ctrl-C is the trainer's: it saves first. This script stays to write down how it ended.
  printf '=== %s: %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$(<"$run_dir/command")" >>"$run_dir/log"
  set +e
  PYTHONUNBUFFERED=1 bash "$run_dir/command" 2>&1 | tee -i -a "$run_dir/log"
  codes=("${PIPESTATUS[@]}")
  set -e
  printf '=== ended with exit code %s\n' "${codes[0]}" >>"$run_dir/log"
  printf '%s\n' "${codes[0]}" >"$run_dir/exit_code"
}

status() {
  local state=none
  if running; then
    state=running
  elif [[ -f $run_dir/exit_code ]]; then
    state="ended $(<"$run_dir/exit_code")"
  elif [[ -f $run_dir/command ]]; then
    state=lost # killed, or the host was started again
  fi
  printf '%s %s\n' "$(hostname)" "$state"
}

logs() {
  [[ -f $run_dir/log ]] || fail "there is no log here: start first."
  running || exec tail -n 200 "$run_dir/log"
  tail -n 200 -F "$run_dir/log" &
  while running; do sleep 1; done
  sleep 1 # the last lines
  kill "$!"
}

stop() {
  if ! running; then
    status
    return
  fi
  tmux send-keys -t "=$name:" C-c
  for ((waited = 0; waited < stop_grace_s; waited++)); do
    if ! running; then
      status
      return
    fi
    sleep 1
  done
  fail "still under way ${stop_grace_s} s after Ctrl-C. Look at the logs; a second stop ends it without saving."
}

kill_run() {
  if running; then tmux kill-session -t "=$name"; fi
}

action=$1 name=$2
shift 2
case $action in
  install) install_all "$@" ;;
  start) start "$@" ;;
  run) run ;;
  status) status ;;
  logs) logs ;;
  stop) stop ;;
  kill) kill_run ;;
  *) fail "unknown action $action" ;;
esac
