#!/bin/sh
# Two "hosts" on one Linux machine: network namespaces joined by a virtual cable. Runs a command over both with mpiexec.
#   sh scripts/two-hosts.sh PYTHON lockstep-arguments...
# Needs root (for `ip netns`). Nothing is left behind.
set -eu

python=$1
shift
bin=$(dirname "$python")
mark=ls$$
folder=$(mktemp -d)

clean() {
    ip netns pids "$mark"a 2>/dev/null | xargs -r kill 2>/dev/null || true
    ip netns pids "$mark"b 2>/dev/null | xargs -r kill 2>/dev/null || true
    ip netns del "$mark"a 2>/dev/null || true
    ip netns del "$mark"b 2>/dev/null || true
    rm -rf "$folder"
}
trap clean EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

ip netns add "$mark"a
ip netns add "$mark"b
ip link add "$mark"va netns "$mark"a type veth peer name "$mark"vb netns "$mark"b
ip -n "$mark"a addr add 10.77.0.1/24 dev "$mark"va
ip -n "$mark"b addr add 10.77.0.2/24 dev "$mark"vb
for host in a b; do
    ip -n "$mark$host" link set lo up
    ip -n "$mark$host" link set "$mark"v"$host" up
done
for host in a b; do # MPI must not look for its network before the kernel calls it up
    tries=0
    until ip -n "$mark$host" link show dev "$mark"v"$host" | grep -q 'state UP'; do
        tries=$((tries + 1))
        [ $tries -lt 100 ] || break
        sleep 0.05
    done
done

# What ssh does between real hosts: run the rest of the line on the host that is named first.
cat > "$folder/remote" <<EOF
#!/bin/sh
while [ "\${1#-}" != "\$1" ]; do shift; done
host=\$1
shift
case \$host in 10.77.0.1) name=${mark}a ;; *) name=${mark}b ;; esac
exec ip netns exec \$name sh -c "\$*"
EOF
chmod +x "$folder/remote"
printf '10.77.0.1:1\n10.77.0.2:1\n' > "$folder/hosts"

# Shared memory would cross the "hosts": UCX_TLS makes the ranks use the network, as real hosts must.
status=0
UCX_TLS=tcp,self ip netns exec "$mark"a "$bin/mpiexec" -launcher ssh -launcher-exec "$folder/remote" \
    -f "$folder/hosts" -n 2 -ppn 1 -genvall "$python" -m lockstep "$@" || status=$?
echo "over the cable: $(ip netns exec "$mark"a cat /sys/class/net/"$mark"va/statistics/tx_bytes) bytes" >&2
exit $status
