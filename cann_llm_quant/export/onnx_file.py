"""A finished graph as the bytes of `model.onnx`: the only file that needs the onnx library.

Weights are external data: each names `model.onnx.data`, an offset and a length, so that the model itself stays small
however large the weights are (a protobuf message holds at most 2 GB).
"""

from typing import TYPE_CHECKING, Any

from cann_llm_quant import __version__
from cann_llm_quant.errors import UsageError
from cann_llm_quant.export.onnx_graph import DATA_FILE, Graph, Initializer, Value

if TYPE_CHECKING:
    import onnx

# The oldest file format that knows the operators of a version.
_FORMATS = {17: 8, 21: 10}
_CONTRIB_VERSION = 1


def require_onnx() -> None:
    """Raise UsageError when the onnx library is not installed."""
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise UsageError("ONNX export needs the onnx library: pip install 'cann-llm-quant[onnx]'") from error


def model_bytes(graph: Graph, description: str) -> bytes:
    """The model, weights left out."""
    from onnx import helper

    proto = helper.make_graph(
        [
            helper.make_node(
                node.kind, node.inputs, node.outputs, node.name, domain=node.domain or None, **node.attributes
            )
            for node in graph.nodes
        ],
        "decoder",
        [_value(value) for value in graph.inputs],
        [_value(value) for value in graph.outputs],
        [_tensor(initializer) for initializer in graph.initializers.values()],
        value_info=[_value(value) for value in graph.known],
    )
    opsets = [
        helper.make_opsetid(domain, _CONTRIB_VERSION if domain else graph.opset) for domain in sorted(graph.domains)
    ]
    model = helper.make_model(
        proto,
        opset_imports=opsets,
        ir_version=_FORMATS[graph.opset],
        producer_name="cann-llm-quant",
        producer_version=__version__,
        doc_string=description,
    )
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _value(value: Value) -> Any:
    from onnx import helper

    return helper.make_tensor_value_info(value.name, value.element, value.shape)


def _tensor(initializer: Initializer) -> "onnx.TensorProto":
    from onnx import TensorProto

    value = initializer.value
    tensor = TensorProto(name=value.name, data_type=value.element, dims=value.shape)
    if initializer.inline is not None:
        tensor.raw_data = initializer.inline
        return tensor
    tensor.data_location = TensorProto.EXTERNAL
    place = {"location": DATA_FILE, "offset": str(initializer.offset), "length": str(initializer.length)}
    for key, text in place.items():
        tensor.external_data.add(key=key, value=text)
    return tensor
