#!/bin/bash
# usage: .land.sh "message" tests...
set -o pipefail; cd /work/wt/h8a; source /work/main/.venv/bin/activate; export PYTHONPATH=$PWD/src OMP_NUM_THREADS=1
msg="$1"; shift
git add -A -- . ':!.land.sh'; git commit -qm "$msg"
for i in 1 2 3; do
  git rebase main 2>&1 | tail -1
  ruff check -q . && ruff format --check -q . && mypy | tail -1 || exit 1
  if [ $i = 1 ]; then timeout 500 pytest -q "$@" 2>&1 | tail -3; else timeout 100 pytest -q tests/test_import.py 2>&1 | tail -1; fi
  [ $? -eq 0 ] || exit 1
  git -C /work/main merge --ff-only h8a 2>&1 | tail -1 && git -C /work/main merge-base --is-ancestor h8a main && break
done
date
