"""HiSparse without the index keys of S layers, which nobody reads.

SGLang gives an S layer no index keys, except under HiSparse, where each device token has `host_to_device_ratio` of them
in every layer. The pool class takes a list of layers without (`skip_topk_layers`); the configurator hands it none. Here
its two decisions are changed for the target model of an engine that asks for it: which layers the pool leaves out, and
for how many layers a token is counted. What was read of SGLang stands in `needs`, and the pool is read back.
"""
