#!/usr/bin/env bash
# What a runner without a GPU executes: everything. Arguments go to ci/test.sh.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

exec ci/test.sh "$@"
