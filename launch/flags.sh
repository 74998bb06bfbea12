# The command line of tpu_vm.sh and tpu_pod.sh: what it says about itself, how it is read, and what is refused before
# anything runs. Sourced by tpu_node.sh, whose `say`, `fail` and `refuse` it uses.
# shellcheck shell=bash disable=SC2034,SC2154

usage() {
  cat <<END
$about

    $script COMMAND --name=NAME --zone=ZONE [FLAGS] [-- TRAINER_FLAGS]

Commands
    up        create, install, start, logs: everything to a running run
    create    make the node, or take the one of this name that is there
    install   copy the code of this checkout's HEAD and install requirements.txt with jax's TPU extra
    start     start the run in tmux; refused while one is under way
    logs      follow the log (Ctrl-C ends the log, not the run)
    status    the node's state, and each host's: running, ended EXIT_CODE, lost, none
    resume    once: if the node is gone, make it again; if the run is not under way, install and start it
    watch     resume for as long as it takes, until the run ends
    stop      Ctrl-C: the run saves its last finished iteration and ends; the node stays (and costs)
    delete    delete the node with its disk, after asking

Which node
    --name=NAME        name of the node, of its queued resource and of the tmux session
    --zone=ZONE        such as us-west4-a
    --project=PROJECT  else gcloud's default
    --queued           through a queued resource: waits until there is capacity (repeat it for every command)
    --slices=N         so many equal slices as one run (1); --queued goes with it (tpu_pod.sh; repeat it likewise)

How it is made (create, up, resume, watch)
    --type=TYPE        accelerator type, such as v5litepod-8
    --version=VERSION  TPU software; known for v4, v5litepod, v5p and v6e, else needed
    --spot             cheaper, and may be preempted at any time
    --create-flag=FLAG a further flag for gcloud's create, such as --service-account=...; may be repeated

What runs (start, up, resume, watch)
    --config=FILE      such as configs/qwen_1p5b.py
    --workdir=DIR      gs://BUCKET/NAME, or a folder on the hosts that outlives them (NFS) where --spot is used
    --env=NAME=VALUE   a variable of the trainer's environment, such as HF_HOME=/mnt/bucket/hub; may be repeated. Its
                       value is in the hosts' command file and in the log: use a file of --setup for secrets
    -- FLAGS           further flags of the trainer, such as --config.model.path=/mnt/bucket/model

How it is installed (install, up, resume, watch)
    --setup=FILE       a bash script that each host runs before the packages are installed (Python, mounts, data)
    --python=PYTHON    the hosts' interpreter; else the newest of python3.13, 3.12, 3.11, python3
    --dirty            take uncommitted changes of tracked files along, in place of refusing them

How the hosts are reached (all but create, delete)
    --tunnel-through-iap  through Identity-Aware Proxy, for hosts without an address outside
    --ssh-flag=FLAG    a further flag for gcloud's ssh and scp, such as --internal-ip; may be repeated

Otherwise
    --worker=N         whose log is shown (0)
    --node=N           with --slices: on which slice (0)
    --retries=N        watch: restarts of a run that failed, or of a start that did (3); preemptions don't count
    --poll=SECONDS     between two looks (60)
    --backoff=SECONDS  before the first retry, doubled for each further one (30); also after preemptions within 600 s
    --yes              delete without asking
    --dry-run          print the commands that would be run, and run nothing; states are assumed, not asked
    --help             this text; launch/README.md tells the whole way
END
}

parse() {
  action=${1:-}
  case $action in
    -h | --help | help)
      usage
      exit 0
      ;;
    up | create | install | start | logs | status | resume | watch | stop | delete) shift ;;
    '') refuse "a command is needed: $script --help lists them." ;;
    *) refuse "unknown command '$action': $script --help lists them." ;;
  esac
  name='' zone='' project='' type='' version='' config='' workdir='' setup='' python=''
  worker=0 node=0 slices=1 retries=3 poll=60 backoff=30
  spot=false queued=false dirty=false yes=false dry_run=false
  create_flags=() ssh_flags=() variables=() trainer_flags=()
  local argument value
  while (($#)); do
    argument=$1 value=${1#*=}
    shift
    case $argument in
      --name=*) name=$value ;;
      --zone=*) zone=$value ;;
      --project=*) project=$value ;;
      --type=*) type=$value ;;
      --version=*) version=$value ;;
      --create-flag=*) create_flags+=("$value") ;;
      --ssh-flag=*) ssh_flags+=("$value") ;;
      --tunnel-through-iap) ssh_flags+=(--tunnel-through-iap) ;;
      --env=*) variables+=("$value") ;;
      --config=*) config=$value ;;
      --workdir=*) workdir=$value ;;
      --setup=*) setup=$value ;;
      --python=*) python=$value ;;
      --worker=*) worker=$value ;;
      --node=*) node=$value ;;
      --slices=*) slices=$value ;;
      --retries=*) retries=$value ;;
      --poll=*) poll=$value ;;
      --backoff=*) backoff=$value ;;
      --spot) spot=true ;;
      --queued) queued=true ;;
      --dirty) dirty=true ;;
      --yes) yes=true ;;
      --dry-run) dry_run=true ;;
      -h | --help)
        usage
        exit 0
        ;;
      --)
        trainer_flags=(${1+"$@"})
        break
        ;;
      --config.*) refuse "$argument is the trainer's: write it after --." ;;
      --name | --zone | --project | --type | --version | --create-flag | --ssh-flag | --env | --config | --workdir | \
        --setup | --python | --worker | --node | --slices | --retries | --poll | --backoff)
        refuse "$argument needs a value: options are written $argument=VALUE."
        ;;
      *) refuse "unknown flag '$argument': $script --help lists them; flags of the trainer come after --." ;;
    esac
  done
}

check_flags() {
  local number
  need --name "$name" --zone "$zone"
  # Names of Cloud TPU nodes, a subset of what tmux takes as a session's name.
  [[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] ||
    refuse "--name=$name: a node's name has small letters, digits and hyphens, and begins with a letter."
  for number in "$worker" "$node" "$slices" "$retries" "$poll" "$backoff"; do
    [[ $number =~ ^(0|[1-9][0-9]{0,8})$ ]] || # bash reads 010 as 8, and 08 not at all
      refuse "--worker, --node, --slices, --retries, --poll and --backoff are whole numbers without a leading 0; one" \
        "is '$number'."
  done
  check_slices
  case $action in
    up | create | resume | watch) check_node_flags ;;
  esac
  case $action in
    up | start | resume | watch) check_run_flags ;;
  esac
  case $action in
    up | install | resume | watch)
      [[ -z $setup || -f $setup ]] || refuse "--setup=$setup: there is no such file here."
      check_tree
      ;;
  esac
  where=("--zone=$zone")
  if [[ -n $project ]]; then where+=("--project=$project"); fi
  "$dry_run" || command -v gcloud >/dev/null ||
    fail "gcloud is not on PATH. Install it (https://cloud.google.com/sdk/docs/install), then: gcloud auth login"
}

need() { # FLAG VALUE FLAG VALUE...
  while (($#)); do
    [[ -n $2 ]] || refuse "$action needs $1=VALUE: $script --help lists the flags."
    shift 2
  done
}

# Only a queued resource makes several slices that know of each other.
check_slices() {
  ((slices >= 1)) || refuse "--slices=$slices: a run has at least one slice."
  hosts=tpu-vm every_node=() one_node=()
  ((slices > 1)) || return 0
  [[ $workers == all ]] || refuse "--slices=$slices: $script starts one process; use launch/tpu_pod.sh."
  hosts=queued-resources every_node=(--node=all) one_node=("--node=$node") queued=true
}

check_node_flags() {
  local flag
  need --type "$type"
  for flag in ${create_flags[@]+"${create_flags[@]}"}; do
    case $flag in
      --node-count* | --node-prefix*)
        refuse "--create-flag=$flag asks for several slices: launch/tpu_pod.sh --slices=2 makes them."
        ;;
    esac
  done
  case $type in
    [0-9]*x*) refuse "--type=$type names several slices: write launch/tpu_pod.sh --type=${type#*x} --slices=${type%%x*}." ;;
    v2-* | v3-*)
      refuse "--type=$type: this generation is not supported; the programs are made for v4 and newer, such as" \
        "--type=v5litepod-8."
      ;;
  esac
  [[ -z $version ]] || return 0
  case $type in # https://cloud.google.com/tpu/docs/runtimes
    v4-*) version=tpu-ubuntu2204-base ;;
    v5litepod-*) version=v2-alpha-tpuv5-lite ;;
    v5p-*) version=v2-alpha-tpuv5 ;;
    v6e-*) version=v2-alpha-tpuv6e ;;
    *) refuse "the TPU software for --type=$type is not known here: add --version=VERSION." ;;
  esac
}

check_run_flags() {
  local variable
  need --config "$config" --workdir "$workdir"
  for variable in ${variables[@]+"${variables[@]}"}; do
    [[ $variable =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || refuse "--env=$variable is not of the form --env=NAME=VALUE."
  done
  local remedy="name a folder of a bucket, gs://BUCKET/NAME, or one that is mounted on the hosts (--setup)."
  case $workdir in
    gs://?* | /*) ;;
    *)
      if "$spot" || [[ $action == watch ]]; then
        refuse "--workdir=$workdir lies in the code's folder on the host and is lost with it: $remedy"
      fi
      ;;
  esac
}

# The code that is copied is HEAD, so that a run can be told by its commit.
check_tree() {
  local changed
  git -C "$root" rev-parse --verify --quiet HEAD >/dev/null || fail "$root is no git checkout with a commit: clone it."
  changed=$(git -C "$root" status --porcelain --untracked-files=no)
  if [[ -n $changed ]] && ! "$dirty"; then
    fail "tracked files have changes that are not committed, and the hosts get HEAD: commit them, or add --dirty:
$changed"
  fi
  local file=$config
  [[ $config == */* || $config == *.py ]] || file=configs/$config.py # the name of a packaged configuration
  if [[ -n $config && $config != /* ]] && ! git -C "$root" ls-files --error-unmatch -- "$file" >/dev/null 2>&1; then
    fail "--config=$config is not tracked by git, so it would not be copied: git add it (and commit, or add --dirty)."
  fi
}
