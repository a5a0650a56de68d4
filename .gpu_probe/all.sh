# usage: all.sh OUT ; each group in its own process, logs joined
L=/tmp/logs; mkdir -p $L $1
export XLA_FLAGS=--xla_gpu_autotune_level=0
T=tests/pallas_kernels
p() { name=$1; shift; ( s=$SECONDS; timeout -k 3 ${LIMIT:-150} python3 -m pytest -q -rA --tb=short --show-capture=no -p no:cacheprovider "$@" >$L/$name.log 2>&1; echo "rc $? $((SECONDS-s)) s" >>$L/$name.log ) & }
s() { name=$1; shift; ( s=$SECONDS; timeout -k 3 ${LIMIT:-150} "$@" >$L/$name.log 2>&1; echo "rc $? $((SECONDS-s)) s" >>$L/$name.log ) & }
if [ "$2" = probe ]; then
s 00probe python3 .gpu_probe/probe.py
s 01narrow python3 .gpu_probe/probe.py narrow
s 02sanitizer compute-sanitizer --tool memcheck python3 .gpu_probe/probe.py
fi
p 10odd $T/test_fp8_on_gpu.py -k odd
p 11float32 $T/test_fp8_on_gpu.py -k "float32_results or gradients"
p 12tiles $T/test_fp8_on_gpu.py -k "every_tile and Decode"
p 13tiles $T/test_fp8_on_gpu.py -k "every_tile and not Decode"
p 20grouped $T/test_grouped_on_gpu.py -k "bfloat16"
p 21grouped $T/test_grouped_on_gpu.py -k "not bfloat16"
p 30mla $T/test_mla_on_gpu.py -k "every_number"
p 31mla $T/test_mla_on_gpu.py -k "not every_number"
p 40attention $T/test_flash_attention_on_gpu.py -n 5
wait
for f in $L/*.log; do echo "##### $f"; cat $f; done >$1/all.log
for f in $L/*.log; do echo "$f $(tail -1 $f) | $(grep -E 'passed|failed' $f | tail -1)"; done
