# What fresh.sh runs as PID 1 of the new Debian, with the log on descriptor 3.
trap 'exit 130' INT TERM

# runWait bounds make run until its demo is up: packages, modules and builds
# come first. In seconds, as is stopWait, which bounds its end after Ctrl-C.
runWait=1200
stopWait=120

failed() { printf '%-12s FAILED after %d s: %s\n' "$1" "$2" "$3"; failures=$((failures + 1)); }
passed() { printf '%-12s %4d s\n' "$1" "$2"; }
failures=0

# leftovers prints what a step must not leave: processes, cgroups, mounts and
# files in the temporary directories.
mounts=$(cut -d' ' -f5 /proc/self/mountinfo)
leftovers() {
	local pid
	for pid in /proc/[0-9]*; do
		pid=${pid#/proc/}
		[[ $pid == 1 || $pid == "$BASHPID" || ! -e /proc/$pid/exe ]] || echo "process $pid: $(tr '\0' ' ' </proc/"$pid"/cmdline)"
	done
	find /sys/fs/cgroup -mindepth 1 -type d -printf 'cgroup %p\n'
	comm -13 <(sort <<<"$mounts") <(cut -d' ' -f5 /proc/self/mountinfo | sort) | sed 's/^/mount /'
	# The directory of X sockets is made by the first X server of a machine and
	# stays; what is in it has to go.
	find /tmp /var/tmp -mindepth 1 -maxdepth 1 ! -name 'node-compile-cache' ! -path /tmp/.X11-unix -printf 'file %p\n'
	find /tmp/.X11-unix -mindepth 1 -printf 'file %p\n' 2>/dev/null || true
}

cd /root/abfleet
start=$SECONDS
{
	update-ca-certificates
	apt-get update
	apt-get install -y make git gcc ca-certificates
	go version
	node --version
	npm --version
} >&3 2>&1
passed packages $((SECONDS - start))

# make run, as at a terminal: Ctrl-C goes to the whole process group.
start=$SECONDS
mkfifo /run/demo
set -m
make run >/run/demo 2>&1 &
demo=$!
set +m
exec 4</run/demo
wait=$runWait last='' up='' gone=''
while IFS= read -r -t "$wait" line <&4; do
	echo "$line" >&3
	last=$line
	case $line in
	'Ctrl-C ends the demo.')
		up=$((SECONDS - start)) wait=$stopWait
		kill -INT -- "-$demo"
		;;
	'The demo is gone.') gone=yes ;;
	esac
done
exec 4<&-
kill -KILL -- "-$demo" 2>/dev/null || true
status=0
wait "$demo" || status=$?
if [[ -z $up ]]; then
	failed "make run" $((SECONDS - start)) "the demo did not come up; its last line: $last"
elif [[ -z $gone || $status != 0 && $status != 130 ]]; then
	failed "make run" $((SECONDS - start)) "the demo did not end cleanly (status $status); its last line: $last"
elif left=$(leftovers) && [[ -n $left ]]; then
	failed "make run" $((SECONDS - start)) $'it leaves\n'"$left"
else
	passed "make run" "$up"
	printf '%-12s %4d s\n' "  Ctrl-C" $((SECONDS - start - up))
fi

start=$SECONDS
if make test TESTFLAGS=-v >/root/test.log 2>&1; then result=passed; else result=failed; fi
cat /root/test.log >&3
if [[ $result == failed ]]; then
	failed "make test" $((SECONDS - start)) ".cache/fresh.log says why"
	grep -E '^(\s*--- FAIL|FAIL|panic:|make:)' /root/test.log || true
elif left=$(leftovers) && [[ -n $left ]]; then
	failed "make test" $((SECONDS - start)) $'it leaves\n'"$left"
else
	passed "make test" $((SECONDS - start))
fi
printf '%-12s %d passed, %d failed, %d skipped; %d packages passed\n' '' \
	"$(grep -cE '^\s*--- PASS' /root/test.log)" "$(grep -cE '^\s*--- FAIL' /root/test.log)" "$(grep -cE '^\s*--- SKIP' /root/test.log)" "$(grep -cE '^ok' /root/test.log)"
grep -B 1 -E '^\s*--- SKIP' /root/test.log | grep -E '_test\.go:[0-9]+: |[a-z]+\.go:[0-9]+: ' | sort | uniq -c | sed 's/^/    skipped: /' || true
exit $((failures > 0))
