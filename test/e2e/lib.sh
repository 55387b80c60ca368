# What run, build.sh and devicemanager/run have in common. It is sourced.

# phase NAME COMMAND... says how long COMMAND took.
phase() {
  local name=$1 start=$SECONDS
  shift
  "$@"
  printf 'e2e: %-38s %4d s\n' "$name" $((SECONDS - start))
}

# again COMMAND... runs COMMAND until it succeeds, four times at most: a network fails for a while. What fails for another
# reason fails fast the second time, as Go keeps what it has built.
again() {
  local pause
  for pause in 5 15 45; do
    if "$@"; then return 0; fi
    echo "e2e: failed: $*; trying again in $pause s" >&2
    sleep "$pause"
  done
  "$@"
}
