def supports(call): return f"it needs a GPU of compute capability 9.0; got {call.device}"
def supports_backward(call): return f"it needs a GPU of compute capability 9.0; got {call.device}"
