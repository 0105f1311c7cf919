#!/usr/bin/env bash
# A SLURM cluster of one node, this machine, for the tests. As root, on Debian:
#   tests/slurm/cluster.sh up     installs what is missing and starts the daemons
#   tests/slurm/cluster.sh down   stops them
# CPUS, MEMORY (MB) and GPUS say what the node claims to have; the GPUs are empty devices, which is all
# that SLURM needs to give each job one of its own.
set -euo pipefail
folder=${CLUSTER_FOLDER:-/tmp/latentmake-cluster}
cpus=${CPUS:-4} memory=${MEMORY:-16000} gpus=${GPUS:-4}
node=$(hostname -s)

stop() {
  scancel --user="$(id -un)" 2>/dev/null || true
  local name pid
  for name in "$folder/slurmd.pid" "$folder/slurmctld.pid" /run/munge/munged.pid; do
    if [[ -s $name ]]; then
      pid=$(<"$name")
      kill "$pid" 2>/dev/null || true
      timeout 15 tail --pid="$pid" -f /dev/null || true
    fi
  done
}

install_packages() {
  if ! command -v slurmctld >/dev/null || ! command -v slurmd >/dev/null || ! command -v munged >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null
  fi
}

configure() {
  install -d "$folder" "$folder/controller" "$folder/node" /etc/slurm
  local devices=""
  : >/etc/slurm/gres.conf
  if ((gpus > 0)); then
    for ((number = 0; number < gpus; number++)); do
      [[ -c $folder/gpu$number ]] || mknod "$folder/gpu$number" c 1 3
    done
    echo "NodeName=$node Name=gpu File=$folder/gpu[0-$((gpus - 1))]" >/etc/slurm/gres.conf
    devices="Gres=gpu:$gpus"
  fi
  printf '%s\n' \
    ClusterName=latentmake "SlurmctldHost=$node(127.0.0.1)" SlurmUser=root AuthType=auth/munge \
    MpiDefault=none ProctrackType=proctrack/linuxproc TaskPlugin=task/none ReturnToService=2 \
    JobAcctGatherType=jobacct_gather/none AccountingStorageType=accounting_storage/none \
    SelectType=select/cons_tres SelectTypeParameters=CR_Core_Memory GresTypes=gpu \
    SchedulerParameters=sched_interval=2,bf_interval=2 SlurmdParameters=config_overrides \
    MinJobAge=300 KillWait=5 "StateSaveLocation=$folder/controller" "SlurmdSpoolDir=$folder/node" \
    "SlurmctldPidFile=$folder/slurmctld.pid" "SlurmdPidFile=$folder/slurmd.pid" \
    "SlurmctldLogFile=$folder/slurmctld.log" "SlurmdLogFile=$folder/slurmd.log" \
    "NodeName=$node NodeAddr=127.0.0.1 CPUs=$cpus RealMemory=$memory $devices" \
    "PartitionName=test Nodes=$node Default=YES MaxTime=120 DefMemPerCPU=100 State=UP" \
    >/etc/slurm/slurm.conf
}

start() {
  install -d -o munge -g munge -m 755 /run/munge
  [[ -s /etc/munge/munge.key ]] || runuser -u munge -- mungekey --create
  pgrep -x munged >/dev/null || runuser -u munge -- munged
  slurmctld -c
  slurmd -c
  for _ in {1..60}; do
    if [[ $(sinfo --noheader --format=%T 2>/dev/null) == idle ]]; then break; fi
    sleep 0.5
  done
  srun --time=1 true
  sinfo --Node --format="%N %T %c %m %G"
}

case ${1:-} in
  up) install_packages; configure; start ;;
  down) stop; rm -f /etc/slurm/slurm.conf ;; # without a controller each Snakemake would wait for it
  *) echo "usage: $0 up | down" >&2; exit 2 ;;
esac
