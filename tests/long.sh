#!/usr/bin/env bash
# The tests that run for long, with a tally at the end: make soak, make faults
# and make fuzz. The full log is .cache/<which>.log.
#
#   tests/long.sh soak | faults | fuzz TIME-PER-TARGET
set -uo pipefail
cd "$(dirname "$0")/.."
which=${1-}
log=.cache/$which.log
mkdir -p .cache
: >"$log"
start=$SECONDS
broken=0

# try runs go test and shows, as they come, the results of whole tests and what
# packages say; what a failed test printed is shown after it.
try() {
	go test -v -count=1 -timeout 120m "$@" 2>&1 | tee -a "$log" |
		grep --line-buffered -E '^(--- (PASS|FAIL|SKIP)|ok|FAIL|panic:|# )'
	[[ ${PIPESTATUS[0]} == 0 ]] || broken=$((broken + 1))
}

tally() {
	if ((broken > 0)); then
		printf '\nwhat failed, from %s:\n' "$log"
		grep -A 30 -E '^\s*--- FAIL|^panic:|^# ' "$log" | head -n 120
	fi
	printf '\n%s: %d tests passed, %d failed, %d skipped in %d s\n' "$which" \
		"$(grep -cE '^\s*--- PASS' "$log")" "$(grep -cE '^\s*--- FAIL' "$log")" "$(grep -cE '^\s*--- SKIP' "$log")" $((SECONDS - start))
	exit $((broken > 0))
}

case $which in
soak)
	# Many cycles of start, switch and stop, many deaths of the service, many
	# sessions at once, many histories of the fleet.
	ABF_CYCLES=200 ABF_ROUNDS=40 ABF_SESSIONS=20 try -run '^(TestNoGrowth|TestFaultKill|TestManyAtOnce)$' ./tests/e2e
	ABF_RUN='^(TestTwentyDisplays|TestServiceDiesBeforeRelease)$' try -count=5 -run '^TestInRig$' ./runtime/stack
	try -run '^(TestNoHope|TestRandom)$' ./internal/fleet -rapid.checks=1000
	tally
	;;
faults)
	# Every fault point on both kinds of Stack, and further moments; its tally is
	# printed at the end.
	ABF_FAULTS=all try ./tests/faults
	ABF_ROUNDS=20 try -run '^TestFault' ./tests/e2e
	# Those that need one Stack, one scope or one file only.
	ABF_RUN='^(TestForeignThings|TestRecover|TestAmbiguityChangesNothing|TestServiceDiesBeforeRelease|TestRefusals|TestLoginSurvives)$' \
		try -run '^TestInRig$' ./runtime/stack
	try -run '^(TestInRig|TestRoot)' ./runtime/proof ./runtime/unit
	try -run '^(TestDamage|TestFullDisk|TestReadOnly|TestMissing|TestCopies|TestRestoreRefused)$' ./internal/store
	sed -n '/^fault  /,/^faults: /p' "$log"
	tally
	;;
fuzz)
	each=${2:?time for each target, as 30s}
	targets=0
	while IFS=: read -r file target; do
		targets=$((targets + 1))
		printf '%-24s %s\n' "$target" "$(dirname "$file")"
		go test -run '^$' -fuzz "^$target\$" -fuzztime "$each" -timeout 0 "./$(dirname "$file")" >"$log.one" 2>&1
		status=$?
		cat "$log.one" >>"$log"
		grep -E '^fuzz: elapsed' "$log.one" | tail -n 1 | sed 's/^fuzz:/   /'
		[[ $status == 0 ]] && continue
		# Before Go 1.27 the fuzzer may report the end of its time as a failure
		# (go.dev/issue/75804); a real one comes with its input or a panic.
		if grep -qE '^\s+context deadline exceeded$' "$log.one" && ! grep -qE '^panic:|Failing input|\.go:[0-9]+:' "$log.one"; then
			echo "    ended by its time"
			continue
		fi
		broken=$((broken + 1))
		grep -vE '^fuzz: elapsed' "$log.one" | head -n 60 | sed 's/^/    /'
	done < <(git ls-files --cached --others --exclude-standard '*_test.go' | xargs grep -HoE '^func Fuzz[A-Za-z0-9_]+' | sed 's/:func /:/' | sort)
	rm -f "$log.one"
	printf '\nfuzz: %d targets, %d failed, %s each, %d s\n' "$targets" "$broken" "$each" $((SECONDS - start))
	exit $((broken > 0 || targets == 0))
	;;
*)
	echo "usage: tests/long.sh soak | faults | fuzz TIME-PER-TARGET" >&2
	exit 2
	;;
esac
