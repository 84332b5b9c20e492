#!/usr/bin/env bash
# The main job of `make demo`: two ranks learn the King James Bible byte by byte, and four go on from their checkpoint. Arguments
# are overrides of configs/demo.toml, e.g. --train.max_seconds=60. BUILD names the build folder, RANKS and RESUME_RANKS the numbers
# of ranks, RUN the folder of the results, DEMO the configuration in configs/ (demo-moe: `make demo-moe`).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly demo=${DEMO:-demo}
readonly program=${BUILD:-build}/bin/hp-train config=configs/$demo.toml torchrun=.venv/bin/torchrun
readonly ranks=${RANKS:-2} run=${RUN:-runs/$demo}
readonly text=$run/bible.txt resume_ranks=${RESUME_RANKS:-$((ranks == 2 ? 4 : 2))}

die() {
  printf '[demo] error: %s\n' "$*" >&2
  exit 1
}
say() { printf '[demo] %s\n' "$*"; }

[ -x "$program" ] || die "$program is missing: run 'make build' first"
[ -x "${BUILD:-build}/bin/hp-ckpt" ] || die "${BUILD:-build}/bin/hp-ckpt is missing: run 'make build' first"
[ -x "$torchrun" ] || die "$torchrun is missing: run 'make setup' first"

# The text is made once: written beside its place and moved, so that an interrupted run leaves no half of it.
if [ ! -s "$text" ]; then
  bible=$(command -v bible || command -v /usr/games/bible) || die "the program 'bible' is missing (Debian package bible-kjv): run 'make setup' first"
  mkdir -p "$run"
  "$bible" -f 'Gen1:1-Rev22:21' </dev/null >"$text.part"
  [ "$(wc -c <"$text.part")" -gt 4000000 ] || die "'bible' printed only $(wc -c <"$text.part") bytes, want about 4.4 million: see $text.part"
  mv "$text.part" "$text"
fi
say "text: $text, the King James Bible, $(wc -c <"$text") bytes"
say "$ranks ranks, one thread each; the settings are in $config"

rm -rf "$run/result.txt" "$run/checkpoints" "$run/resumed"
export OMP_NUM_THREADS=1
train() {
  "$torchrun" --standalone --no-python --nproc-per-node "$1" "$program" "$config" \
    --data.path="$text" --log.dir="$(dirname "$run")" --log.name="$(basename "$run")" "${@:2}"
}
train "$ranks" "$@" || die "training failed, see the message above"
[ -s "$run/result.txt" ] || die "training left no $run/result.txt"

# The same run on another number of ranks: a few steps more, into a folder of their own.
last_checkpoint() { find "$run/checkpoints" -maxdepth 1 -name 'step-*' 2>/dev/null | sort | tail -n 1; }
last=$(last_checkpoint)
[ -n "$last" ] || die "training left no checkpoint in $run/checkpoints, want --checkpoint.every above 0"
last=$((10#${last##*/step-}))
printf '\n'
say "$resume_ranks ranks go on from step $last, which $ranks ranks saved"
train "$resume_ranks" "$@" --resume --checkpoint.dir="$run/checkpoints" --log.dir="$run" --log.name=resumed --log.every=5 \
  --sample.prompts='[]' --train.max_seconds=0 --train.max_steps=$((last + 20)) || die "resuming failed, see the message above"
[ -s "$run/resumed/result.txt" ] || die "resuming left no $run/resumed/result.txt"

alone=$config
[ "$demo" = demo ] || alone="$config --parallel.ep=1"
cat <<MESSAGE

What you have
  $run/loss.svg       the loss curve: open it in a browser
  $run/samples.txt    the text above
  $run/metrics.jsonl  every step as a line of JSON
  $run/config.toml    the settings that gave this run
  $run/checkpoints    model, optimizer and position in the text, for any number of ranks

What to try next
  another text:       make $demo DEMO_ARGS="--data.path=/path/to/a/file/or/folder"
  a larger model:     make $demo DEMO_ARGS="--model.dim=256 --model.ffn_dim=704 --train.max_seconds=1200"
  bfloat16 compute:   make $demo DEMO_ARGS="--precision.param_dtype=bfloat16"
  one rank:           $program $alone
  go on:              $program $config --resume --train.max_seconds=0 --train.max_steps=$((last + 1000))
  all settings:       $program --help

MESSAGE

# The last checkpoint as a folder that other tools open.
saved=$(last_checkpoint)
"${BUILD:-build}/bin/hp-ckpt" convert "$saved" "$run/hf" --to hf --config "$run/config.toml" --overwrite || die "exporting $saved failed"
say "transformers.AutoModelForCausalLM.from_pretrained(\"$run/hf\") opens the model, AutoTokenizer its tokenizer of bytes"
printf 'DEMO %s\n' "$(cat "$run/result.txt")"
