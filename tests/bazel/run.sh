#!/usr/bin/env bash
# Builds BUILD and runs its tests with Debian's Bazel 4, offline:
#
#   bash tests/bazel/run.sh PYTHON                              every test file
#   bash tests/bazel/run.sh PYTHON --test_tag_filters=small     the quick ones; any flag of `bazel test` will do
#
# PYTHON is that of a virtual environment with jax, nanobind and what the tests import, but without jax_fp8, which
# would hide the module built here. A missing Bazel is installed with apt-get.
#
# Bazel 4 wants a WORKSPACE beside BUILD, and this one suits Debian alone. So it is linked, with the sources, into a
# folder below .build/ where `bazel` then runs.
set -euo pipefail
readonly root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

install_bazel() {
  local -a as_root=()
  [ "$(id -u)" -eq 0 ] || as_root=(sudo)
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    bazel-bootstrap bazel-platforms bazel-rules-java >/dev/null
}

link_sources() { # into folder $1
  local path
  mkdir -p "$1"
  find "$1" -maxdepth 1 -type l -delete
  for path in "$root"/*; do # no dot files, so not .build
    [ "$path" = "$root/MODULE.bazel" ] || ln -s "$path" "$1/"
  done
  ln -s "$root/tests/bazel/debian.WORKSPACE" "$1/WORKSPACE"
}

main() {
  local python stage=$root/.build/bazel
  [ $# -gt 0 ] || { echo "usage: bash tests/bazel/run.sh PYTHON [FLAGS OF bazel test]" >&2; exit 2; }
  python=$(realpath -s "$1")
  shift
  command -v bazel >/dev/null || install_bazel
  link_sources "$stage/src"
  cd "$stage/src"
  trap 'bazel --output_user_root="$root/.build/bazel/out" shutdown' EXIT
  # The sandbox works, but Debian's build of Bazel logs each of its mounts.
  bazel --output_user_root="$stage/out" test //:all \
    --compilation_mode=opt --spawn_strategy=local --symlink_prefix=/ --test_output=errors \
    --repo_env=PYTHON_BIN_PATH="$python" --test_env=PATH="$(dirname "$python"):/usr/bin:/bin" "$@"
}

main "$@"
