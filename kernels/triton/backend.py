from ..call import *
from ..settings import Settings
from . import launch, cached_launch
def supports(call):
    if call.dtype is torch.float64: return "it computes in float16, bfloat16 and float32; got float64"
    if max(call.head_dim,call.v_head_dim)>1024: return f"its head dimensions go up to 1024; got {max(call.head_dim,call.v_head_dim)}"
    if call.device.type=="cpu" and call.dtype is torch.bfloat16: return "Triton's interpreter computes wrong bfloat16 products"
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
