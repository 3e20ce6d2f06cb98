#!/usr/bin/env bash
# Runs the tests marked `every_triton` with each Triton that the library knows and constraints.txt does not pin:
#
#     tools/tritons.sh PYTHON [ARGUMENTS OF PYTEST]
#
# Each lies in a folder of a cache, from which it takes the place of the environment's own; what is missing is fetched,
# 200 to 290 MB each. They run side by side. The exit status is 0 only if the tests passed with all of them.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$1
shift

# Each with what it needs beside it: the interpreter of 3.6 fails with NumPy 2.4.
# The newest first: its compiler takes longest.
tritons=(triton==3.9.0 triton==3.8.0 "triton==3.6.0 numpy<2.4")

tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])') || exit 1
cache=${XDG_CACHE_HOME:-$HOME/.cache}/cs336_systems

fetch() { # FOLDER REQUIREMENT...; it gets its name when it is whole
    local folder=$1 unfinished
    shift
    [[ ! -d $folder ]] || return 0
    echo "fetching $* into $folder"
    mkdir -p "$cache" && unfinished=$(mktemp -d "$folder.XXXXXX") || return 1
    if "$python" -m pip --disable-pip-version-check install --no-deps --target "$unfinished" "$@" &&
        mv -T "$unfinished" "$folder"; then
        return 0
    fi
    rm -rf "$unfinished"
    [[ -d $folder ]] # another run may have been faster
}

# Only these files are read: to collect all tests takes longer than some of these take. tests/conftest.py sees to it
# that no other has such tests.
mapfile -t files < <(grep -rlw every_triton tests --include='test_*.py')

run() { # FOLDER VERSION ARGUMENT...
    local PYTHONPATH=$1:$PWD${PYTHONPATH:+:$PYTHONPATH} version=$2
    export PYTHONPATH
    shift 2
    "$python" -c "import triton; assert triton.__version__ == '$version', triton" &&
        "$python" -m pytest -p no:cacheprovider -m every_triton "$@" "${files[@]}"
}

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export TEST_RUNS=${#tritons[@]} # side by side, which share the workers of `-n auto`
declare -A running
summary=()
status=0
for triton in "${tritons[@]}"; do
    read -ra requirements <<<"$triton"
    version=${requirements[0]#triton==}
    if fetch "$cache/triton-$version-$tag" "${requirements[@]}"; then
        run "$cache/triton-$version-$tag" "$version" "$@" >"$logs/$version" 2>&1 &
        running[$version]=$!
    fi
done
for triton in "${tritons[@]}"; do
    read -r version _ <<<"${triton#triton==}"
    printf '\n===== triton %s\n' "$version"
    if [[ -z ${running[$version]:-} ]]; then
        result="FAILED: it could not be fetched"
    elif wait "${running[$version]}"; then
        result=passed
    else
        result=FAILED
    fi
    [[ $result == passed ]] || status=1
    [[ ! -e $logs/$version ]] || cat "$logs/$version"
    last=$(grep -hsE '[0-9]+ (passed|failed|errors?).* in [0-9.]+s' "$logs/$version" | tail -n 1 | tr -d '=')
    summary+=("triton $version $result $last")
done
printf '\n'
printf '%s\n' "${summary[@]}"
exit "$status"
