#!/usr/bin/env bash
# Tries the repository's HEAD the way a newcomer does: a new Debian 12 that has
# make, git, gcc, Go and Node, a clone, make run until the demo is up and Ctrl-C,
# then make test. The Debian is a directory with its own mounts, processes and
# cgroups; it shares only the network, and nothing of it is left at the end.
#
#   tests/fresh/fresh.sh [directory to build it in, default below /var/tmp]
#
# Needs root, debootstrap, Go, Node and a reachable Debian mirror: the one in
# the machine's own apt sources. The full log is .cache/fresh.log.
set -euo pipefail
umask 022

die() { echo "cannot try a fresh Debian: $*" >&2; exit 1; }

repo=$(cd "$(dirname "$0")/../.." && pwd)
if [[ ${1-} != --private ]]; then
	[[ $EUID == 0 ]] || die "root is required"
	for program in debootstrap git go node npm; do
		command -v $program >/dev/null || die "there is no $program here"
	done
	# Mounts made from here on are of this process, and end with it.
	exec unshare --mount --propagation private "$0" --private "$@"
fi
shift

step() { # TITLE COMMAND...: runs it into the log and says how long it took
	local title=$1 start=$SECONDS status
	shift
	set +e # in a condition, the command would go on after its own failures
	(set -e && "$@") >&3 2>&1
	status=$?
	set -e
	if [[ $status != 0 ]]; then
		printf '%-12s FAILED after %d s (status %d); the end of its log:\n' "$title" $((SECONDS - start)) $status
		tail -n 40 "$log" | sed 's/^/    /'
		exit 1
	fi
	printf '%-12s %4d s\n' "$title" $((SECONDS - start))
}

base=${1:-/var/tmp}
mkdir -p "$base" "$repo/.cache"
log=$repo/.cache/fresh.log
exec 3>"$log"
work=$(mktemp -d "$base/abfleet-fresh-XXXXXXXX")
root=$work/root
group=$work/cgroup/$(basename "$work")
machine=

cleanup() {
	trap '' INT TERM
	[[ -z $machine ]] || kill -KILL "$machine" 2>/dev/null || true
	if [[ -d $group ]]; then
		echo 1 >"$group/cgroup.kill"
		local tries=200
		until grep -q 'populated 0' "$group/cgroup.events" || ((tries-- == 0)); do sleep 0.1; done
		find "$group" -depth -type d -exec rmdir {} +
	fi
	local points
	mapfile -t points < <(awk -v under="$work/" 'index($5, under) == 1 { print $5 }' /proc/self/mountinfo | sort -r)
	((${#points[@]} == 0)) || umount --lazy "${points[@]}"
	rm -rf --one-file-system "$work"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# A cgroup of its own, whatever the machine's layout is.
mkdir "$root" "$work/cgroup"
mount -t cgroup2 cgroup2 "$work/cgroup"
mkdir "$group"

# The mirrors that the machine itself uses.
sources() { apt-get indextargets --format '$(ORIGIN) $(REPO_URI) $(RELEASE)' 'Created-By: Packages' | awk '$1 == "Debian" { print $2, $3 }' | sort -u; }
[[ -n $(sources) ]] || apt-get update >&3 2>&1
mirror=$(sources | awk '$2 !~ /-security$/ { print $1; exit }')
security=$(sources | awk '$2 ~ /-security$/ { print $1; exit }')
[[ -n $mirror ]] || die "the machine's apt sources name no Debian mirror"

# What the machine says about reaching registries: proxies, certificates and
# the settings of the clients.
mapfile -t passed < <(env | grep -iE '^([a-z_]*_proxy|npm_config_[a-z_]*|[A-Z_]*SSL_CERT_[A-Z]*|NODE_EXTRA_CA_CERTS|GIT_SSL_CAINFO)=' || true)
for name in GOPROXY GONOPROXY GOSUMDB GONOSUMDB GOPRIVATE GOINSECURE GOTOOLCHAIN; do
	passed+=("$name=$(go env $name)")
done

install_debian() {
	debootstrap --variant=minbase --include=ca-certificates bookworm "$root" "$mirror"
	{
		echo "deb $mirror bookworm main"
		echo "deb $mirror bookworm-updates main"
		[[ -z $security ]] || echo "deb $security bookworm-security main"
	} >"$root/etc/apt/sources.list"
	apt-config dump | grep '^Acquire::' >"$root/etc/apt/apt.conf.d/99machine"
	if [[ -e /etc/ssl/certs/ca-certificates.crt ]]; then
		cp /etc/ssl/certs/ca-certificates.crt "$root/usr/local/share/ca-certificates/machine.crt"
	fi
	echo fresh >"$root/etc/hostname"
	printf '127.0.0.1 localhost\n::1 localhost\n127.0.1.1 fresh\n' >"$root/etc/hosts"
}

copy_tools() {
	cp -a --reflink=auto "$(go env GOROOT)" "$root/usr/local/go"
	local node npm
	node=$(readlink -f "$(command -v node)")
	npm=$(readlink -f "$(command -v npm)")
	npm=${npm%/bin/*}
	cp "$node" "$root/usr/local/bin/node"
	mkdir -p "$root/usr/local/lib/node_modules" "$root/usr/local/etc"
	cp -a "$npm" "$root/usr/local/lib/node_modules/npm"
	ln -s ../lib/node_modules/npm/bin/npm-cli.js "$root/usr/local/bin/npm"
	ln -s ../lib/node_modules/npm/bin/npx-cli.js "$root/usr/local/bin/npx"
	local from
	from=$(npm config get userconfig)
	[[ ! -e $from ]] || install -m 0600 "$from" "$root/root/.npmrc"
	from=$(npm config get globalconfig)
	[[ ! -e $from ]] || install -m 0600 "$from" "$root/usr/local/etc/npmrc"
}

clone() {
	git clone --quiet --no-local --depth 1 "file://$repo" "$root/root/abfleet"
	git -C "$root/root/abfleet" log -1 --format='HEAD is %h: %s'
}

# enter becomes PID 1 of the new machine. It runs in namespaces of its own.
enter() {
	mount --bind "$root" "$root"
	cd "$root"
	mount -t proc -o nosuid,nodev,noexec proc proc
	mount -t sysfs -o nosuid,nodev,noexec sysfs sys
	mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 sys/fs/cgroup
	mount -t tmpfs -o nosuid,mode=0755 tmpfs dev
	local name
	for name in null zero full random urandom tty; do
		cp -a "/dev/$name" "dev/$name"
	done
	ln -s /proc/self/fd dev/fd
	ln -s /proc/self/fd/0 dev/stdin
	ln -s /proc/self/fd/1 dev/stdout
	ln -s /proc/self/fd/2 dev/stderr
	ln -s pts/ptmx dev/ptmx
	mkdir dev/pts dev/shm old
	mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts dev/pts
	mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs dev/shm
	hostname fresh
	# A plain chroot would forbid user namespaces to everything in it.
	if pivot_root . old 2>&3; then
		cd /
		umount --lazy /old
		rmdir /old
	else # the machine's root is its initial one
		rmdir old
		mount --move . /
	fi
	exec chroot . /usr/bin/env -i "${passed[@]}" \
		HOME=/root USER=root LOGNAME=root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
		PATH=/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
		/bin/bash -euo pipefail /root/newcomer.sh
}

[[ -z $(git -C "$repo" status --porcelain) ]] || echo "note: what is not committed is not tried"
step debootstrap install_debian
step tools copy_tools
step clone clone
cp "$repo/tests/fresh/newcomer.sh" "$root/root/newcomer.sh"
git -C "$root/root/abfleet" log -1 --format='HEAD is %h: %s'

# Job control: without it, bash has background jobs ignore Ctrl-C for good.
export -f enter
export root passed_text="${passed[*]@Q}"
set -m
(
	echo $BASHPID >"$group/cgroup.procs"
	exec unshare --mount --propagation private --pid --fork --kill-child --ipc --uts --cgroup \
		bash -euo pipefail -c 'eval "passed=($passed_text)"; enter'
) </dev/null &
machine=$!
status=0
wait "$machine" || status=$?
machine=
exit "$status"
