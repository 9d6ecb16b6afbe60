#!/usr/bin/env bash
# One run over two tasks of a real Slurm on this machine (Debian's slurm-wlm and munge; installed if they are missing and may be).
# Needs root, and leaves no daemon behind.
#   bash scripts/test_slurm.sh
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v srun slurmctld slurmd munged >/dev/null; then
    [ "$(id -u)" = 0 ] && timeout 180 apt-get install -y -q slurm-wlm munge >/dev/null 2>&1 || {
        echo "skipped: slurm-wlm and munge are not installed, and can't be here"
        exit 0
    }
fi
folder="$(mktemp -d)"
chmod 755 "$folder"
cleanup() {
    for daemon in slurmd slurmctld munge/munged; do
        [ -e "$folder/$daemon.pid" ] && kill "$(cat "$folder/$daemon.pid")" 2>/dev/null
    done
    sleep 1
    rm -rf "$folder"
}
trap cleanup EXIT
install -d -o munge -m 755 "$folder/munge"
as_munge() { runuser -u munge -- "$@"; }
as_munge mungekey --create --keyfile "$folder/munge/key"
as_munge munged --key-file "$folder/munge/key" --socket "$folder/munge/socket" --pid-file "$folder/munge/munged.pid" \
    --log-file "$folder/munge/log" --seed-file "$folder/munge/seed"
mkdir "$folder/state" "$folder/spool"
host="$(hostname -s)"
cat >"$folder/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc)
PartitionName=all Nodes=ALL Default=YES
CONF
export SLURM_CONF="$folder/slurm.conf"
slurmctld
slurmd -N "$host"
for _ in $(seq 50); do
    [ "$(sinfo -h -o %t 2>/dev/null)" = idle ] && break
    sleep 0.2
done
timeout 300 srun -n 2 --overcommit .venv/bin/python -m fluxjax.train --config=configs/vlm.py:debug --config.run_dir="$folder/run"
trained() { # FOLDER of a run
    .venv/bin/python - "$1/summary.json" <<'CHECK'
import json, sys

summary = json.load(open(sys.argv[1]))
assert summary["complete"] and summary["devices"] == 2, summary
print(f"two tasks of Slurm trained {summary['steps']} steps on {summary['devices']} devices")
CHECK
}
trained "$folder/run"
# The same with a server of ours beside them, which loads what the first run has trained.
CHECKPOINT="$folder/run/model" RUN_DIR="$folder/served" ENGINE=serve SERVER=rollout.serve SERVER_FLAGS="--dtype float32" TRAINERS=2 \
    timeout 300 sbatch --quiet --wait --nodes=1 --gpus-per-node=0 --output="$folder/served.log" deploy/slurm.sbatch \
    --config=configs/vlm.py:debug --config.warm_start.steps=0 || {
    cat "$folder/served.log"
    exit 1
}
trained "$folder/served"
