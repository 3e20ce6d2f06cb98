from ..call import *
from ..settings import Settings
from . import launch, cached_launch
def supports(call):
    import torch, os
    from ..rules import registry
    from ..torch_names import holds_for_all_sizes
    hold=lambda c: holds_for_all_sizes(c) if torch.compiler.is_compiling() else bool(c)
    if call.dtype is torch.float64: return "it computes in float16, bfloat16 and float32; got float64"
    if call.device.type=="cuda" and os.environ.get("TRITON_INTERPRET","0").lower() in ("1","true","yes","on","y"): return "TRITON_INTERPRET is set, so its kernels run on CPU tensors alone; got cuda"
    if call.device.type=="cuda":
        M,m=torch.cuda.get_device_capability(call.device)
        if M<8: return f"it needs a GPU of compute capability 8.0 or newer; {call.device} has {M}.{m}"
    if hold(call.q_len>MAX_LENGTH) or hold(call.k_len>MAX_LENGTH): return f"it counts rows in 32 bits, up to {MAX_LENGTH}; got {call.q_len} of q and {call.k_len} of k"
    if max(call.head_dim,call.v_head_dim)>1024: return f"its head dimensions go up to 1024; got {max(call.head_dim,call.v_head_dim)}"
    if 0.9999 < call.options.dropout_p < 1 and call.dtype is torch.float32: return f"in float32 its dropout_p goes up to 0.9999, or is 1; got {call.options.dropout_p}"
    if call.device.type=="cpu" and call.dtype is torch.bfloat16: return "Triton's interpreter computes wrong bfloat16 products"
    if torch.is_grad_enabled():
        captured=[(leaf[0],slot) for leaf in call.options.scores for slot,item in enumerate(leaf[1]) if item is None]
        for (name,slot),t in zip(reversed(captured),reversed(call.aux.score_aux)):
            if t.requires_grad and slot not in registry[name].gradients: return f"the score rule {name} captured a tensor that needs a gradient, and has no `gradient` for it"
    return None
def supports_backward(call): return None
def _s(call):
    o=call.options; a=call.aux
    causal="none"; w=(o.window_left,o.window_right)
    if not o.bottom_right: causal="top_left"; w=(o.window_left,None)
    elif o.window_right==0: causal="bottom_right"; w=(o.window_left,None)
    packed=(o.max_seqlen_q,o.max_seqlen_k) if call.is_packed else None
    return Settings(causal,w,o.dropout_p or None,o.mask,o.score_rules,a.sinks is not None,a.block_rows is not None,packed,o.deterministic)
def plan_forward(call):
    o=call.options
    if call.aux.cache_lengths is not None:
        c=cached_launch.Call(o.scale,o.window_left,o.softcap)
        return lambda q,k,v,aux: cached_launch.forward(q,k,v,aux.cache_lengths,c)
    s=_s(call)
    return lambda q,k,v,aux: launch.forward(q,k,v,o.scale,s.text,s.numbers,aux.tensors)
def plan_backward(call,out,dout,has_dlse,wanted):
    o=call.options; s=_s(call)
    def run(q,k,v,out,lse,dout,dlse,aux):
        n=len(aux.tensors)-len(aux.score_aux)
        w=([0] if wanted.sinks else [])+[n+i for i,x in enumerate(wanted.score_aux) if x]
        dq,dk,dv,g=launch.backward(q,k,v,out,lse,dout,dlse,o.scale,s.text,s.numbers,aux.tensors,w)
        g=iter(g)
        return Gradients(dq,dk,dv,next(g) if wanted.sinks else None, tuple(next(g) if x else None for x in wanted.score_aux))
    return run
