#!/bin/bash
# A real Slurm cluster of several nodes on one machine, to try jobs out and for the tests (tests/slurm.py).
#
# No systemd, no files outside DIR, no fixed host name. It needs root; and on Debian 12, whose Slurm can run several
# slurmd on a machine:
#   apt-get install --no-install-recommends slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2
#   apt-get install --no-install-recommends slurmdbd slurm-wlm-mysql-plugin mariadb-server      # for DBD=1
#
# Usage:
#   cluster.sh start DIR          start (or, if it already runs, report it); waits until every node is idle
#   cluster.sh stop DIR           kill everything of this cluster, running jobs too; keeps DIR/log
#   cluster.sh status DIR         exit 0 when all daemons live and the controller answers
#   cluster.sh exec DIR CMD...    run CMD on the cluster's login node (needed with ISOLATION=net, harmless else)
#   cluster.sh node-kill DIR n1   power failure: slurmd, the job steps and the jobs of n1 die at once
#   cluster.sh node-start DIR n1  boot n1 again
#   cluster.sh slurmd-kill DIR n1 kill -9 only n1's slurmd; its job steps live on
#   cluster.sh slurmd-start DIR n1
#   cluster.sh ctld-kill DIR      kill -9 slurmctld (clients see "Unable to contact slurm controller")
#   cluster.sh ctld-start DIR     start it again; it recovers its jobs from DIR/state
#
# Knobs (environment, read by `start` and then kept in DIR/cluster.env):
#   ISOLATION=ns   ns:  each node in its own UTS, mount and PID namespace: own hostname, own /etc/hosts, own process
#                       table (so that node-kill is complete); the network is the machine's: nodes are 127.0.1.N
#                  net: a network namespace per node too, joined by a bridge: own localhost, own ports, own address
#   NODES=4 CPUS=2 MEM=2000 GPUS=2    per node; declared, not real, so CPUS and MEM (MiB) may exceed the machine's
#   NODE_TMP=0     1: every node has a /tmp of its own; DIR and the folders in SHARED (a:b:...) stay shared
#   CGROUP=0       1: memory limits are enforced (state OUT_OF_MEMORY), by cgroup v1; one such cluster at a time
#   DBD=0          1: also mariadbd and slurmdbd, so that sacct, accounts and QOS work
#   PORT=16800     first of the TCP ports used (PORT..PORT+9+NODES); two clusters in ns mode need two ranges
#   WAIT=60        seconds that each wait may last
#   CRED_EXPIRE=5  seconds: life of a step's credential, and so how long a requeued job waits (Reason=BeginTime);
#                  Slurm's own default makes that 121 s
#   EXTRA_CONF=    further lines for slurm.conf, e.g. 'EnforcePartLimits=ALL'
set -euo pipefail
umask 022

die() { echo "cluster.sh: $*" >&2; exit 1; }
usage() { sed -n '2,/^set -e/{/^set -e/d;s/^# \{0,1\}//;p}' "$0"; exit 2; }

SELF=$(readlink -f "$0")
CMD=${1:-}; [ -n "$CMD" ] || usage
[ $# -ge 2 ] || usage
mkdir -p "$2"
DIR=$(readlink -f "$2")
shift 2
case $DIR in *[[:space:]]*|/) die "DIR must have no spaces and not be /";; esac
RUN=$DIR/run; LOG=$DIR/log; CONF=$DIR/etc/slurm.conf
export PATH=$PATH:/usr/sbin:/sbin

# Knobs: those of the cluster that is there win over the environment, except for a fresh start.
load_knobs() {
    # shellcheck source=/dev/null
    if [ -f "$DIR/cluster.env" ]; then . "$DIR/cluster.env"; fi
}
[ "$CMD" = start ] || load_knobs
: "${ISOLATION:=ns}" "${NODES:=4}" "${CPUS:=2}" "${MEM:=2000}" "${GPUS:=2}" "${NODE_TMP:=0}" "${SHARED:=}"
: "${DBD:=0}" "${CGROUP:=0}" "${PORT:=16800}" "${WAIT:=60}" "${CRED_EXPIRE:=5}" "${EXTRA_CONF:=}"
NET=10.213.77            # only ever inside the cluster's own network namespaces (ISOLATION=net)
names() { seq -f 'n%.0f' 1 "$NODES"; }
host_ip() { [ "$ISOLATION" = net ] && echo "$NET.$((10 + ${1#n}))" || echo "127.0.1.${1#n}"; }
head_ip() { [ "$ISOLATION" = net ] && echo "$NET.1" || echo 127.0.0.1; }
node_port() { [ "$ISOLATION" = net ] && echo $((PORT + 2)) || echo $((PORT + 9 + ${1#n})); }
case $ISOLATION in ns|net) ;; *) die "ISOLATION must be ns or net";; esac

# ---------------------------------------------------------------- processes
# The cluster is boxes: `head` (munged, slurmctld, slurmdbd, mariadbd) and the nodes (one slurmd each). A box is an
# `unshare` process, known by a pid file holding "pid starttime" (the start time guards against a recycled pid);
# killing it (--kill-child) kills the init of its PID namespace and so, at once, every process in the box.
starttime() { awk '{sub(/^.*\) /, ""); print $20}' "/proc/$1/stat" 2>/dev/null || true; }
note_pid() { echo "$2 $(starttime "$2")" > "$RUN/$1.pid"; }
alive() { # alive NAME: prints the pid if that very process still runs
    local pid st
    [ -f "$RUN/$1.pid" ] || return 1
    read -r pid st < "$RUN/$1.pid" || return 1
    [ -n "$pid" ] && [ -n "$st" ] && [ "$(starttime "$pid")" = "$st" ] || return 1
    [ "$(awk '{sub(/^.*\) /, ""); print $1}' "/proc/$pid/stat" 2>/dev/null)" != Z ] || return 1
    echo "$pid"
}
init_of() { # init_of BOX: host pid of the PID namespace's init (the child of unshare)
    local pid children
    pid=$(alive "$1") || return 1
    children=$(cat "/proc/$pid/task/$pid/children" 2>/dev/null)
    [ -n "${children%% *}" ] && echo "${children%% *}"
}
wait_for() { # wait_for WHAT CMD...: poll until CMD succeeds, at most $WAIT seconds
    local what=$1 end=$((SECONDS + WAIT)); shift
    until "$@" >/dev/null 2>&1; do
        ! grep -hs 'fatal:' "$LOG"/*.out >&2 || return 1      # a daemon refused its configuration: waiting is pointless
        [ -z "${WATCH-}" ] || alive "$WATCH" >/dev/null || { echo "cluster.sh: $WATCH died" >&2; return 1; }
        [ $SECONDS -lt $end ] || { echo "cluster.sh: after $WAIT s still waiting for $what" >&2; return 1; }
        sleep 0.05
    done
}
gone() { ! alive "$1" >/dev/null; }
kill_box() {
    local pid
    if pid=$(alive "$1"); then
        kill -KILL "$pid" 2>/dev/null || true
        wait_for "$1 to end" gone "$1"
    fi
    rm -f "$RUN/$1.pid"
}

# Start BOX (head or a node), running "$SELF __box DIR BOX" as its init. All file descriptors are detached, so that no
# caller (a CI runner, subprocess.run(capture_output=True)) waits for a pipe that a daemon keeps open.
start_box() {
    local box=$1 ns=(unshare --uts --mount --ipc --pid --fork --kill-child --mount-proc)
    [ "$ISOLATION" = net ] && ns+=(--net)
    # A clean environment: nothing of the caller's (SLURM_*, VIRTUAL_ENV, ...) may leak into daemons.
    local clean=(PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8)
    setsid env -i "${clean[@]}" ${TZ:+TZ="$TZ"} "${ns[@]}" "$SELF" __box "$DIR" "$box" \
        </dev/null >>"$LOG/$box.out" 2>&1 9>&- &
    note_pid "$box" $!
    disown
}
inside() { # inside BOX CMD...: run CMD in all of BOX's namespaces
    local box=$1 pid enter
    shift
    pid=$(init_of "$box") || die "$box is not running"
    enter=(nsenter -t "$pid" -u -m -p)
    [ "$ISOLATION" = net ] && enter+=(-n)
    "${enter[@]}" -- "$@"
}
# login CMD...: run CMD as on the login node: the head's network and host name and the cluster's /etc/hosts, but the
# caller's own processes, files and working directory (so that CMD may itself call node-kill and the like)
login() {
    local pid enter
    pid=$(init_of head) || die "the cluster in $DIR is not running"
    enter=(nsenter -t "$pid" -u)
    [ "$ISOLATION" = net ] && enter+=(-n)
    # shellcheck disable=SC2016
    env SLURM_CONF="$CONF" "${enter[@]}" -- \
        unshare --mount sh -c 'mount --bind "$0" /etc/hosts && exec "$@"' "$DIR/etc/hosts" "$@"
}

# ---------------------------------------------------------------- what runs inside a box
box_main() { # pid 1 of its PID namespace; bash reaps the orphans that slurmd leaves
    local box=$1
    hostname "$box"
    mount --bind "$DIR/etc/hosts" /etc/hosts
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    if [ "$NODE_TMP" = 1 ] && [ "$box" != head ]; then # a /tmp in which only DIR and $SHARED are the machine's
        local hold=$DIR/spool/$box/tmp folder more
        mkdir -p "$hold"
        chmod 1777 "$hold"
        IFS=: read -ra more <<<"$SHARED"
        for folder in "$DIR" "${more[@]}"; do
            case $folder in /tmp/*)
                mkdir -p "$hold${folder#/tmp}"
                mount --bind "$folder" "$hold${folder#/tmp}"
                ;;
            esac
        done
        mount --rbind "$hold" /tmp
    fi
    if [ "$ISOLATION" = net ]; then
        ip link set lo up
        if [ "$box" = head ]; then
            ip link add br0 type bridge
            ip addr add "$(head_ip)/24" dev br0
            ip link set br0 up
        else
            wait_for "eth0 of $box" ip link show eth0       # not /sys/class/net: that mount still shows the host's
            ip addr add "$(host_ip "$box")/24" dev eth0
            ip link set eth0 up
        fi
    fi
    if [ "$box" = head ]; then
        start_munged
        [ "$DBD" = 1 ] && start_dbd
        run_ctld
    else
        run_slurmd "$box"
    fi
    : > "$RUN/$box.ready"
    # Outlive our daemons: slurmd may be killed and started again while its job steps go on.
    while :; do sleep 86400 & wait $! || true; done
}
start_munged() {
    # --force: DIR may be closed to other users, as pytest's temporary folders are.
    munged --force --key-file="$DIR/etc/munge.key" --socket="$RUN/munge.socket" --pid-file="$RUN/munged.nspid" \
           --log-file="$LOG/munged.log" --seed-file="$DIR/state/munge.seed" --num-threads=10
}
run_ctld()   { slurmctld -D -f "$CONF" >>"$LOG/slurmctld.out" 2>&1 </dev/null & }
run_slurmd() { env SLURM_CONF="$CONF" slurmd -D -N "$1" -f "$CONF" >>"$LOG/slurmd-$1.out" 2>&1 </dev/null & }
start_dbd() {
    local my=$DIR/state/mysql sock=$RUN/mysql.socket
    if [ ! -d "$my/mysql" ]; then
        mkdir -p "$my"
        mariadb-install-db --user=root --datadir="$my" --auth-root-authentication-method=normal --skip-test-db \
            >>"$LOG/mariadb.log" 2>&1
    fi
    mariadbd --no-defaults --user=root --datadir="$my" --socket="$sock" --pid-file="$my/pid" --bind-address=127.0.0.1 \
        --port=$((PORT + 4)) --skip-name-resolve --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 \
        --innodb-flush-log-at-trx-commit=0 --performance-schema=OFF >>"$LOG/mariadb.log" 2>&1 </dev/null &
    wait_for mariadbd mariadb-admin --no-defaults -uroot -S "$sock" ping
    mariadb --no-defaults -uroot -S "$sock" -e "CREATE DATABASE IF NOT EXISTS slurm_acct_db;
        CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY 'slurm';
        GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';"
    env SLURM_CONF="$CONF" slurmdbd -D >>"$LOG/slurmdbd.out" 2>&1 </dev/null &
    wait_for slurmdbd env SLURM_CONF="$CONF" sacctmgr -n list cluster
    local manage=(env SLURM_CONF="$CONF" sacctmgr -iQ)
    "${manage[@]}" add cluster ci
    "${manage[@]}" add account ml Description=ml Organization=ml
    "${manage[@]}" add user root Account=ml DefaultAccount=ml
    "${manage[@]}" add qos urgent Priority=10
    "${manage[@]}" modify user root set qos+=normal,urgent
} >>"$LOG/dbd-setup.log" 2>&1

# ---------------------------------------------------------------- configuration
write_conf() {
    local n f v gres
    mkdir -p "$DIR"/{etc,run,log,state,spool,gpu}
    chmod 755 "$DIR" "$DIR"/{etc,run,log,state,spool,gpu}
    [ -f "$DIR/etc/munge.key" ] || { (umask 077; head -c 1024 /dev/urandom > "$DIR/etc/munge.key"); }
    {
        printf '127.0.0.1 localhost\n::1 localhost\n%s head\n' "$(head_ip)"
        for n in $(names); do echo "$(host_ip "$n") $n"; done
    } > "$DIR/etc/hosts"
    for v in ISOLATION NODES CPUS MEM GPUS NODE_TMP DBD CGROUP PORT WAIT CRED_EXPIRE SHARED; do
        printf '%s=%q\n' $v "${!v}"
    done > "$DIR/cluster.env"
    cat > "$CONF" <<END
# Generated by cluster.sh; ISOLATION=$ISOLATION
ClusterName=ci
SlurmctldHost=head($(head_ip))
SlurmctldPort=$PORT
SlurmdPort=$((PORT + 2))
AuthType=auth/munge
AuthInfo=socket=$RUN/munge.socket,cred_expire=${CRED_EXPIRE}
CredType=cred/munge
SlurmUser=root
SlurmdUser=root

StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$RUN/slurmctld.nspid
SlurmdPidFile=$RUN/slurmd-%n.nspid
SlurmctldLogFile=$LOG/slurmctld.log
SlurmdLogFile=$LOG/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info

# Without cgroups linuxproc finds a job's processes through /proc; tasks are never bound to cores.
ProctrackType=$([ "$CGROUP" = 1 ] && echo proctrack/cgroup || echo proctrack/linuxproc)
TaskPlugin=$([ "$CGROUP" = 1 ] && echo task/cgroup || echo task/none)
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
MpiDefault=none
SwitchType=switch/none

# Believe the declared CPUs/RealMemory, whatever this machine has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=$((MEM / CPUS / 2))
GresTypes=gpu

# Quick reactions: the defaults are made for thousands of nodes.
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
SlurmctldTimeout=10
SlurmdTimeout=10
MessageTimeout=10
TCPTimeout=5
KillWait=5
MinJobAge=3600
InactiveLimit=0
Waittime=0
ReturnToService=2

# Requeue and preemption: jobs in \`low\` are requeued when \`high\` needs their node; they first get the signal
# they asked for with --signal (else SIGTERM), and GraceTime seconds to react.
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PriorityType=priority/basic
END
    if [ "$DBD" = 1 ]; then
        cat >> "$CONF" <<END

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=$(head_ip)
AccountingStoragePort=$((PORT + 3))
# Not a password: the munge socket to use towards slurmdbd (AuthInfo does not count there).
AccountingStoragePass=$RUN/munge.socket
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,limits,qos
END
        (umask 077; cat > "$DIR/etc/slurmdbd.conf" <<END
AuthType=auth/munge
AuthInfo=socket=$RUN/munge.socket
DbdHost=head
DbdAddr=$(head_ip)
DbdPort=$((PORT + 3))
SlurmUser=root
LogFile=$LOG/slurmdbd.log
PidFile=$RUN/slurmdbd.nspid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((PORT + 4))
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
END
        )
    fi
    { echo
      for n in $(names); do
        [ "$GPUS" -gt 0 ] && gres="Gres=gpu:$GPUS" || gres=
        echo "NodeName=$n NodeAddr=$(host_ip "$n") Port=$(node_port "$n") CPUs=$CPUS RealMemory=$MEM $gres"
      done
      echo
      echo "PartitionName=DEFAULT MaxTime=INFINITE DefaultTime=60 PreemptMode=OFF"
      echo "PartitionName=main  Nodes=ALL PriorityTier=10 Default=YES"
      echo "PartitionName=low   Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=10"
      echo "PartitionName=high  Nodes=ALL PriorityTier=20"
      echo "PartitionName=short Nodes=n1  PriorityTier=10 MaxTime=5 DefaultTime=1"
    } >> "$CONF"
    [ -z "$EXTRA_CONF" ] || printf '\n%s\n' "$EXTRA_CONF" >> "$CONF"
    # Fake GPUs: File= must stat() as a character device (a link to one will do), else CUDA_VISIBLE_DEVICES stays unset.
    : > "$DIR/etc/gres.conf"
    if [ "$GPUS" -gt 0 ]; then
        for n in $(seq 0 $((GPUS - 1))); do ln -sfn /dev/null "$DIR/gpu/nvidia$n"; done
        echo "AutoDetect=off" > "$DIR/etc/gres.conf"
        [ "$GPUS" -gt 1 ] && f="$DIR/gpu/nvidia[0-$((GPUS - 1))]" || f="$DIR/gpu/nvidia0"
        echo "NodeName=n[1-$NODES] Name=gpu File=$f Flags=nvidia_gpu_env" >> "$DIR/etc/gres.conf"
    fi
    if [ "$CGROUP" = 1 ]; then
        [ -d /sys/fs/cgroup/memory ] || die "CGROUP=1 needs cgroup v1's memory controller"
        printf '%s\n' CgroupPlugin=cgroup/v1 IgnoreSystemd=yes ConstrainRAMSpace=yes ConstrainSwapSpace=yes \
            AllowedSwapSpace=0 > "$DIR/etc/cgroup.conf"
    fi
    printf 'export SLURM_CONF=%q\n' "$CONF" > "$DIR/env.sh"
}

# ---------------------------------------------------------------- commands
all_idle() {
    local states
    states=$(login sinfo -h -N -o '%N %T' -p main) || return 1
    [ "$(grep -c ' idle$' <<<"$states")" -eq "$NODES" ]
}
plug_in() { # ISOLATION=net: a veth pair between the head's bridge and the node
    [ "$ISOLATION" = net ] || return 0
    local n=$1 np
    wait_for "namespaces of $n" init_of "$n"
    np=$(init_of "$n")
    wait_for "the network of $n" sh -c "[ \"\$(readlink /proc/$np/ns/net)\" != \"\$(readlink /proc/self/ns/net)\" ]"
    nsenter -t "$(init_of head)" -n -- ip link add "v-$n" type veth peer name eth0 netns "$np"
    nsenter -t "$(init_of head)" -n -- ip link set "v-$n" master br0 up
}
start_node() {
    rm -f "$RUN/$1.ready"
    mkdir -p "$DIR/spool/$1"
    start_box "$1"
    plug_in "$1"
}
failed() { # a cluster that did not come up whole is taken down again
    trap - EXIT
    { login timeout 5 sinfo -N -l; tail -n 20 "$LOG"/*.log "$LOG"/*.out; } >&2 || true
    "$SELF" __stop "$DIR"
    exit 1
}
lock() {
    exec 9>"$DIR/.lock"
    flock -w "$WAIT" 9 || die "another start or stop of $DIR is under way"
}

case $CMD in
start)
    [ "$(id -u)" = 0 ] || die "needs root"
    for program in slurmctld slurmd sinfo munged; do
        command -v $program >/dev/null || die "$program is missing: see the top of $SELF"
    done
    lock
    t0=$(date +%s.%N)
    if [ -f "$RUN/started" ] && alive head >/dev/null; then
        load_knobs; echo "cluster.sh: already running in $DIR"
    else
        "$SELF" __stop "$DIR"            # leftovers of a cluster that was not stopped
        rm -rf "${DIR:?}"/{run,state,spool,log,etc,gpu}
        write_conf
        trap failed EXIT
        start_box head
        WATCH="head"
        wait_for "the head" test -e "$RUN/head.ready"
        wait_for slurmctld login scontrol ping
        for n in $(names); do start_node "$n"; done
        wait_for "all nodes to be idle" all_idle
        trap - EXIT; : > "$RUN/started"
        echo "cluster.sh: $NODES nodes idle after $(awk "BEGIN{printf \"%.1f\", $(date +%s.%N) - $t0}") s"
    fi
    login sinfo -N -o '%N %P %T %c %m %G'
    echo
    if [ "$ISOLATION" = net ]; then
        echo "use it:  $SELF exec $DIR sinfo"
    else
        echo "use it:  export SLURM_CONF=$CONF      (or: . $DIR/env.sh)"
    fi
    echo "end it:  $SELF stop $DIR"
    ;;
stop)
    lock
    exec "$SELF" __stop "$DIR"
    ;;
__stop)
    for f in "$RUN"/*.pid; do [ -e "$f" ] && kill_box "$(basename "$f" .pid)"; done
    rm -f "$RUN"/munge.socket* "$RUN"/*.ready "$RUN/started"
    if [ "$CGROUP" = 1 ]; then   # Slurm leaves its cgroups behind: the nodes' folders, by now without processes
        for n in $(names); do
            find /sys/fs/cgroup/*/"slurm_$n" -depth -type d -exec rmdir {} \; 2>/dev/null || true
        done
    fi
    ;;
status)
    rc=0
    for box in head $(names); do
        if pid=$(alive "$box"); then echo "$box up (pid $pid)"; else echo "$box down"; rc=1; fi
    done
    login timeout 10 scontrol ping || rc=1
    login timeout 10 sinfo -N -o '%N %P %T' || rc=1
    exit $rc
    ;;
exec)  login "$@" ;;
node-kill)   kill_box "$1" ;;
node-start)  alive "$1" >/dev/null && die "$1 already runs"; start_node "$1" ;;
slurmd-kill) inside "$1" kill -KILL "$(cat "$RUN/slurmd-$1.nspid")" ;;
slurmd-start) inside "$1" setsid "$SELF" __slurmd "$DIR" "$1" </dev/null >/dev/null 2>&1 & disown ;;
__slurmd)    run_slurmd "$1"; disown ;;
ctld-kill)   inside head kill -KILL "$(cat "$RUN/slurmctld.nspid")" ;;
ctld-start)
    inside head setsid "$SELF" __ctld "$DIR" </dev/null >/dev/null 2>&1 &
    wait $!
    wait_for slurmctld login scontrol ping
    ;;
__ctld)      run_ctld; disown ;;
__box)       box_main "$1" ;;
*) usage ;;
esac
