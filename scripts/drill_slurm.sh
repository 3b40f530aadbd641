#!/usr/bin/env bash
# Shards on a real SLURM: start a cluster of one node on the loopback interface, disturb a sweep on it, and hold its
# records and its table to those of an undisturbed run in one process. For a throwaway machine, as root.
#
#     scripts/drill_slurm.sh [tiny|smollm2]
#
# First sweep: one shard is requeued in the middle, as by a preemption; the other gets the signal that SLURM sends
# before a time limit, upon which submitit requeues it. Second sweep: a shard is cancelled; the command must say so and
# fail, and the same command must then send that shard alone. What is started is stopped by its process id; all files
# are in a temporary folder, save for Debian's slurm-wlm and munge, which are installed where they are missing.
set -euo pipefail

MODEL=${1:-tiny}
ROOT=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
cd "$ROOT"

fail() { echo "slurm=failed $*"; exit 1; }

# Wait until a command succeeds: until SECONDS WHAT COMMAND...
until_true() {
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@"; do
        ((SECONDS < end)) || fail "waited in vain until $what"
        sleep 0.2
    done
}

[[ $EUID == 0 ]] || fail "this must run as root"
for program in munged slurmctld slurmd sbatch; do
    command -v "$program" > /dev/null && continue
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge > /dev/null
done

DIR=$(mktemp -d "${TMPDIR:-/tmp}/graphkv-slurm.XXXXXX")
chmod 755 "$DIR"
mkdir "$DIR/munge" "$DIR/state" "$DIR/spool"
PIDS=() LAUNCHER=

stop() {
    local code=$?
    [[ -z $LAUNCHER ]] || kill "$LAUNCHER" 2> /dev/null || true
    if ((${#PIDS[@]} == 3)); then # jobs end before the daemons that watch over them
        scancel --user="$(id -un)" || true
        for _ in $(seq 100); do [[ -n $(squeue --noheader) ]] || break; sleep 0.2; done
    fi
    for ((i = ${#PIDS[@]} - 1; i >= 0; i--)); do kill "${PIDS[i]}" && wait "${PIDS[i]}" || true; done
    if ((code)); then echo "logs are in $DIR" >&2; else rm -rf "$DIR"; fi
}
trap stop EXIT

# --- the cluster ---------------------------------------------------------------------------------------------------

dd if=/dev/urandom of="$DIR/munge/key" bs=1024 count=1 status=none
chown -R munge: "$DIR/munge"
chmod 400 "$DIR/munge/key"
setpriv --reuid=munge --regid=munge --clear-groups munged --foreground --key-file="$DIR/munge/key" \
    --socket="$DIR/munge/socket" --pid-file="$DIR/munge/pid" --seed-file="$DIR/munge/seed" > "$DIR/munged.log" 2>&1 &
PIDS+=($!)
until_true 10 "munged listens" test -S "$DIR/munge/socket"

read -r PORT1 PORT2 < <("$PYTHON" -c '
import socket
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(server.getsockname()[1] for server in held))')
HOST=$(hostname -s)
cat > "$DIR/slurm.conf" << CONF
ClusterName=drill
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=$PORT1
SlurmdPort=$PORT2
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$DIR/munge/socket,cred_expire=5
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmdPidFile=$DIR/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
KillWait=1
NodeName=$HOST NodeAddr=127.0.0.1 CPUs=$(nproc)
PartitionName=all Nodes=$HOST Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF=$DIR/slurm.conf
slurmctld -D > "$DIR/slurmctld.log" 2>&1 &
PIDS+=($!)
slurmd -D > "$DIR/slurmd.log" 2>&1 &
PIDS+=($!)
node_is_idle() { [[ $(sinfo --noheader --format=%T 2> /dev/null) == idle ]]; }
until_true 60 "the node is idle" node_is_idle
echo "SLURM $(sbatch --version | cut -d' ' -f2) runs on the loopback interface"

# --- the sweeps ----------------------------------------------------------------------------------------------------

case $MODEL in
    # Long enough that a shard still runs when SLURM has made up its mind to kill it, some seconds after the requeue.
    tiny) LENGTHS='[600,700,800,900]' DEPTHS=$(seq -s, 0 1 99) ;;
    smollm2) LENGTHS='[500]' DEPTHS=$(seq -s, 0 5 95) ;;
    *) fail "the model must be tiny or smollm2, not $MODEL" ;;
esac
SWEEP=(-m "model=$MODEL" scorer=snapkv,pyramidkv +graphkv=on,off budget=64 decode=solo
    "task.lengths=$LENGTHS" "task.depths=[$DEPTHS]" task.max_new_tokens=16)
SHARDS=(hydra.launcher.executor=submitit_slurm shards=2 hydra.launcher.cpus_per_task=1)

run() { # FOLDER ARGUMENTS...: in a subshell; the table goes to FOLDER.table, all else to FOLDER.log
    local folder=$1
    shift
    OMP_NUM_THREADS=1 exec "$PYTHON" run.py "${SWEEP[@]}" "results_dir=$folder" "$@" > "$folder.table" 2>> "$folder.log"
}

stored() { cat "$1"/*/needle/*/records-"$2"of2.jsonl 2> /dev/null | wc -l; } # FOLDER SHARD: its records so far
begun() { # FOLDER SHARD: whether the shard is in the middle of its work
    kill -0 "$LAUNCHER" 2> /dev/null || fail "the command ended too early: $(tail -n 20 "$1.log")"
    (($(stored "$1" "$2") >= 8))
}
to_do() { # FOLDER JOB: how many samples each attempt of a job found to do
    grep -ho '[0-9]* samples to do' "$1"/submitit/*/"$2"_0_log.err | cut -d' ' -f1
}
job_of() { grep -o 'as jobs [0-9]*' "$1.log" | tail -n 1 | cut -d' ' -f3; } # FOLDER: id of the last array that was sent

(run "$DIR/inline") || fail "the undisturbed run: $(tail -n 3 "$DIR/inline.log")"

run "$DIR/requeued" "${SHARDS[@]}" &
LAUNCHER=$!
until_true 600 "both shards have begun" begun "$DIR/requeued" 0
until_true 600 "both shards have begun" begun "$DIR/requeued" 1
ARRAY=$(job_of "$DIR/requeued")
scontrol requeue "${ARRAY}_1"
scancel --signal=USR2 "${ARRAY}_0"
wait "$LAUNCHER" || fail "the command whose shards were requeued: $(tail -n 20 "$DIR/requeued.log")"
LAUNCHER=
for shard in 0 1; do
    mapfile -t counts < <(to_do "$DIR/requeued" "${ARRAY}_$shard")
    echo "shard $shard, job ${ARRAY}_$shard: samples to do at each start: ${counts[*]}"
    ((${#counts[@]} == 2 && 0 < counts[1] && counts[1] < counts[0])) || fail "shard $shard did not resume in the middle"
done

run "$DIR/cancelled" "${SHARDS[@]}" &
LAUNCHER=$!
until_true 600 "shard 0 has begun" begun "$DIR/cancelled" 0
FIRST=$(job_of "$DIR/cancelled")
scancel "${FIRST}_0"
code=0
wait "$LAUNCHER" || code=$?
LAUNCHER=
grep -q "job ${FIRST}_0 (shard 0 of 2) ended without a result" "$DIR/cancelled.log" ||
    fail "a cancelled job was not reported"
((code == 1)) || fail "a command with a cancelled shard ended with exit code $code"
(run "$DIR/cancelled" "${SHARDS[@]}") || fail "the second try: $(tail -n 20 "$DIR/cancelled.log")"
grep -q "sent 1 of 2 shards" "$DIR/cancelled.log" || fail "the second try did more than what was missing"
echo "job ${FIRST}_0 was cancelled, which was reported; the second try sent shard 0 alone"

# --- the comparison ------------------------------------------------------------------------------------------------

PYTHONPATH=scripts "$PYTHON" - "$DIR" << 'COMPARE'
import sys
from collections import Counter
from pathlib import Path

from drill_kill import compare, records

folder = Path(sys.argv[1])


def table(name: str) -> list[list[str]]:
    """Columns of a command's table, but for the last one, its seconds; no paths of figures."""
    lines = (folder / f"{name}.table").read_text(encoding="utf-8").splitlines()
    return [line.split()[:-1] for line in lines if not line.startswith("/")]


names = ("requeued", "cancelled")
wrong = sum((Counter(compare(folder / "inline", folder / name)) for name in names), Counter(lost=0))
tables = sum(table(name) != table("inline") for name in names)
samples = len({sample for _, sample in records(folder / "inline")})
wrong = {name: wrong[name] for name in ("lost", "repeated", "differing")}
state = "failed" if any(wrong.values()) or tables else "ok"
print((folder / "requeued.table").read_text(encoding="utf-8").rsplit("\n", 3)[0])
print(
    f"slurm={state} shards=2 requeued=1 signalled=1 cancelled=1 samples={samples}",
    *(f"{name}={count}" for name, count in wrong.items()),
    f"tables_differing={tables}",
)
sys.exit(state != "ok")
COMPARE
