#!/bin/bash
# tmux and Python on a host, as far as worker.sh and the trainer's command need them; $1 says which. $WORLD has:
#
#   python_version   of the interpreters
#   exit_codes       of successive runs of the trainer, one a line, the last one stays; "running": stays under way
#   installs         what pip was called with, one call a line
#   trained          what the trainer was called with: its folder and flags, each ended by NUL, a newline after a call
role=$1
shift
first_code() { head -n 1 "$WORLD/exit_codes"; }
drop_code() { [ "$(wc -l <"$WORLD/exit_codes")" -eq 1 ] || sed -i 1d "$WORLD/exit_codes"; }

case "$role $*" in
  "tmux has-session -t ="*) [ -f "$HOME/session" ] && [ "=$(<"$HOME/session")" = "$3" ] ;;
  "tmux new-session -d -s "*)
    # A session is a file; what it is to execute has ended when this returns, or never begins.
    if [ "$(first_code)" = running ]; then
      drop_code
      echo "$4" >"$HOME/session"
    else
      "${@:5}" >/dev/null
    fi
    ;;
  "tmux kill-session "*) rm "$HOME/session" ;;
  "tmux send-keys "*)
    rm "$HOME/session"
    echo 130 >"$HOME/reinforce_ada_jax_run/exit_code"
    ;;
  "python --version") echo "Python $(<"$WORLD/python_version")" ;;
  "python -c "*) case $(<"$WORLD/python_version") in 3.11* | 3.12* | 3.13*) ;; *) exit 1 ;; esac ;;
  "python -m venv "*) mkdir -p "$3/bin" && cp "$WORLD/host_bin/python3" "$3/bin/python" ;;
  "python -m pip "*) echo "${*:3}" >>"$WORLD/installs" ;;
  "python -m reinforce_ada_jax.train"*)
    { printf '%s\0' "${PWD#"$HOME/"}" "${@:3}" && echo; } >>"$WORLD/trained"
    echo "a line of the trainer"
    code=$(first_code)
    drop_code
    exit "$code"
    ;;
  *)
    echo "no stand-in for: $role $*" >&2
    exit 1
    ;;
esac
