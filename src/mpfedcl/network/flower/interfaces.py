"""The versions of Flower that mpfedcl supports, and the parts of it that Flower does not document.

Flower documents `flwr.app`: messages and their records. A client that fetches no app, and a server
with access control, need more. `tests/network/test_flower_interfaces.py` compares every import of
the package, and every shape, with this list.
"""

from typing import NamedTuple

SUPPORTED = ("1.41", "1.42")
"""Minor versions with which all tests pass: `make test-flower FLWR=1.42`."""


class Interface(NamedTuple):
    """What is used of a module."""

    module: str
    shapes: dict[str, str]
    """Parameters of functions and classes, fields of messages, values of constants, by name."""
    reason: str


_CALL = "(self, request)"
_CLIENT = "(base_url, *, interceptors=, verify=, timeout=, retry_invoker=)"
_CONNECT = "(server_address, insecure, root_certificates, interceptors, *, retry_invoker=)"

PRIVATE = (
    Interface(
        "flwr.superlink.main",
        {"create_app": "(config=, superlink_lifespan_class=)"},
        "The public command flower-superlink takes no middleware: our server asks for a secret.",
    ),
    Interface(
        "flwr.superlink.cli.flower_superlink",
        {
            "SuperLinkLifespan": "(config, state_factory)",
            "SuperLinkLifespan.startup": "(self)",
            "_parse_superlink_lifespan_config": "()",
        },
        "Flags of flower-superlink for that app, and fewer threads when it starts.",
    ),
    Interface(
        "flwr.supercore.http_logging",
        {"get_uvicorn_log_config": "(log_level)"},
        "The server's log in the format of flower-superlink.",
    ),
    Interface(
        "flwr.supercore.logger",
        {"console_handler": "has level"},
        "The level of that log.",
    ),
    Interface(
        "flwr.supernode.fleet_http_client",
        {
            "FleetHttpClient.from_server_address": _CONNECT,
            "FleetHttpClient.close": "(self)",
            "FleetHttpClient.ActivateNode": _CALL,
            "FleetHttpClient.DeactivateNode": _CALL,
            "FleetHttpClient.SendNodeHeartbeat": _CALL,
            "FleetHttpClient.PullMessages": _CALL,
            "FleetHttpClient.PushMessages": _CALL,
            "FleetHttpClient.PullObject": _CALL,
            "FleetHttpClient.PushObject": _CALL,
            "FleetHttpClient.ConfirmMessageReceived": _CALL,
        },
        "The public command flower-supernode would run the server's app on the client.",
    ),
    Interface(
        "flwr.supernode.node_auth_http_interceptor",
        {"NodeAuthHttpInterceptor": "(private_key, public_key)"},
        "Signs a client's requests as the server checks them.",
    ),
    Interface(
        "flwr.supercore.interceptors",
        {"RuntimeVersionHttpInterceptor": "(component_name)"},
        "Tells the server the version; a server refuses requests without it.",
    ),
    Interface(
        "flwr.supercore.control",
        {
            "ControlHttpClient": _CLIENT,
            "ControlHttpClient.ListNodes": _CALL,
            "ControlHttpClient.RegisterNode": _CALL,
            "ControlHttpClient.StartRun": _CALL,
            "ControlHttpClient.StopRun": _CALL,
            "ControlHttpClient.UnregisterNode": _CALL,
        },
        "The public command flwr cannot show our secret.",
    ),
    Interface(
        "flwr.supercore.protobuf.client",
        {
            "ProtobufClient": _CLIENT,
            "ProtobufClient.from_server_address": _CONNECT,
            "ProtobufClient.__init__": "sets _interceptors",
            "ProtobufRequestContext": "(rpc_method, message, request)",
            "ProtobufCall": "",
        },
        "The place where the secret is added to a request.",
    ),
    Interface(
        "flwr.supercore.error",
        {"FlowerError.from_json": "(value)", "ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE": "23"},
        "The reason of a refusal.",
    ),
    Interface(
        "flwr.cli.build",
        {"build_fab_from_disk": "(app)"},
        "flwr build writes into the current folder; a run must bring an app, which is never "
        "opened.",
    ),
    Interface(
        "flwr.supercore.runtime",
        {
            "RuntimeHttpClient": _CLIENT,
            "RuntimeHttpClient.AcquireTask": _CALL,
            "RuntimeHttpClient.PullTaskInput": _CALL,
            "RuntimeHttpClient.PushTaskOutput": _CALL,
            "RuntimeHttpClient.PullMessages": _CALL,
            "RuntimeHttpClient.PullObject": _CALL,
            "RuntimeHttpClient.ConfirmMessageReceived": _CALL,
        },
        "The public command flower-superexec would unpack and run the app of a run.",
    ),
    Interface(
        "flwr.supercore.constant",
        {
            "TaskType.SERVER_APP": "flwr-serverapp",
            "NodeStatus.ONLINE": "online",
            "NodeStatus.UNREGISTERED": "unregistered",
            "FLEET_HTTP_PUBLIC_KEY_HEADER": "flwr-public-key",
        },
        "The kind of task that our executor takes, which clients are connected, and whose keys are "
        "revoked.",
    ),
    Interface(
        "flwr.common.constant",
        {
            "SubStatus.COMPLETED": "completed",
            "SubStatus.FAILED": "failed",
            "ErrorCode.MESSAGE_UNAVAILABLE": "3",
            "ErrorCode.REPLY_MESSAGE_UNAVAILABLE": "4",
            "ErrorCode.NODE_UNAVAILABLE": "5",
            "HEARTBEAT_PATIENCE": "2",
        },
        "How a run has ended, why a client does not answer, and when it was last seen.",
    ),
    Interface(
        "flwr.supercore.run",
        {"Run": "has run_id, fab_id, override_config"},
        "The run that our executor takes.",
    ),
    Interface(
        "flwr.supercore.task_identity",
        {"TaskIdentity": "has task_id, run_id, node_id"},
        "Flower's grid reads there which run it belongs to.",
    ),
    Interface(
        "flwr.superlink.grid",
        {
            "HttpGrid": "(runtime_api_address=, insecure=, root_certificates=, *, token)",
            "HttpGrid.__init__": "sets node",
            "HttpGrid._connect": "(self)",
            "HttpGrid._runtime_client": "property",
            "HttpGrid.run": "property",
            "HttpGrid.set_run": "(self, run)",
            "HttpGrid.get_nodes": "(self)",
            "HttpGrid.push_messages": "(self, messages)",
        },
        "The public Grid waits two hours for a client that is killed while it answers, and opens "
        "answers of any size.",
    ),
    Interface(
        "flwr.supercore.heartbeat",
        {
            "HeartbeatSender": "(heartbeat_fn)",
            "HeartbeatSender.start": "(self)",
            "HeartbeatSender.stop": "(self)",
            "HeartbeatSender.is_running": "property",
            "make_task_heartbeat_fn_http": "(client)",
        },
        "Beats in the interval after which the server takes a client or a run for dead.",
    ),
    Interface(
        "flwr.common.serde",
        {
            "message_from_proto": "(message_proto)",
            "message_to_proto": "(message)",
            "run_from_proto": "(run_proto)",
        },
        "Messages between Flower's public classes and the wire.",
    ),
    Interface(
        "flwr.app.message",
        {"remove_content_from_message": "(message)"},
        "Content travels apart from its message.",
    ),
    Interface(
        "flwr.app.message.arraychunk",
        {"ArrayChunk": "(data)"},
        "Pieces of an array, which are counted before they are put together.",
    ),
    Interface(
        "flwr.supercore.inflatable.inflatable_object",
        {
            "get_all_nested_objects": "(obj)",
            "get_object_tree": "(obj)",
            "no_object_id_recompute": "()",
            "get_object_body": "(object_content, cls)",
            "get_object_children_ids_from_object_content": "(object_content)",
        },
        "Objects of a message, read within limits: Flower opens any number of gigabytes.",
    ),
    Interface(
        "flwr.supercore.inflatable.inflatable_utils",
        {
            "ObjectPushError": "(object_id, run_id, session_id)",
            "push_objects": "(objects, push_object_fn, *, object_ids_to_push=, keep_objects=, "
            "max_concurrent_pushes=)",
        },
        "Sends the objects of a message.",
    ),
    Interface(
        "flwr.supercore.inflatable.inflatable_protobuf_utils",
        {"make_push_object_fn_protobuf": "(push_object_protobuf, node, run_id, session_id)"},
        "The same, one object per request.",
    ),
    Interface(
        "flwr.proto",
        {
            "control_pb2.ListNodesRequest": "",
            "control_pb2.RegisterNodeRequest": "has public_key, name",
            "control_pb2.StartRunRequest": "has fab, override_config",
            "control_pb2.StopRunRequest": "has run_id",
            "control_pb2.UnregisterNodeRequest": "has node_id",
            "error_pb2.Error": "has code, reason",
            "fab_pb2.Fab": "has hash_str, content",
            "fleet_pb2.ActivateNodeRequest": "has public_key, heartbeat_interval",
            "fleet_pb2.DeactivateNodeRequest": "has node_id",
            "fleet_pb2.PullMessagesRequest": "has node",
            "fleet_pb2.PushMessagesRequest": "has node, messages_list, message_object_trees, "
            "clientapp_runtime_list",
            "heartbeat_pb2.SendNodeHeartbeatRequest": "has node, heartbeat_interval",
            "message_pb2.ConfirmMessageReceivedRequest": "has node, run_id, message_object_id",
            "message_pb2.Message": "has metadata, error",
            "message_pb2.PullObjectRequest": "has node, run_id, object_id",
            "message_pb2.PullObjectResponse": "has object_found, object_available, object_content",
            "node_pb2.Node": "has node_id",
            "node_pb2.NodeInfo": "has node_id, name, public_key, status, heartbeat_interval",
            "runtime_pb2.AcquireTaskRequest": "has supported_task_types",
            "runtime_pb2.PullAppMessagesRequest": "has message_ids",
            "runtime_pb2.PullAppMessagesResponse": "has messages_list",
            "runtime_pb2.PullTaskInputRequest": "",
            "runtime_pb2.PullTaskInputResponse": "has context, run, task_id",
            "runtime_pb2.PushTaskOutputRequest": "has sub_status, details",
            "transport_pb2.Scalar": "has string",
        },
        "The wire format of all these requests.",
    ),
)
