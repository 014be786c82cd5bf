"""KVStore specs, whole and not: the models and a real API server must judge them alike."""

from __future__ import annotations

from typing import Any

MEMORY = {"capacity": "1Gi"}
DISK = {"capacity": "10Gi"}
KEYS = {"keySecretRef": {"name": "kv-keys"}}


def kv_store(**spec: Any) -> dict[str, Any]:
    return {"apiVersion": "paceline.dev/v1alpha1", "kind": "KVStore", "metadata": {"name": "shared"}, "spec": spec}


def claim(**spec: Any) -> dict[str, Any]:
    return {"capacity": "10Gi", "volumeClaimTemplate": {"spec": spec}}


def bucket(**fields: Any) -> dict[str, Any]:
    return {"bucket": "fleet-kv", **fields}


ACCEPTED = [
    kv_store(memory=MEMORY),
    kv_store(memory={"capacity": 1048576}),
    kv_store(disk={**DISK, "path": "/var/lib/paceline/kv"}, ttl="7d", encryption=KEYS, reuse={"policy": "always"}),
    kv_store(disk=DISK, encoding="int8"),
    kv_store(mode="node", disk=DISK, encoding="zstd"),
    kv_store(memory=MEMORY, encoding="none"),
    kv_store(disk=claim(storageClassName="fast", accessModes=["ReadWriteOnce"])),
    kv_store(disk=claim(resources={"requests": {"storage": "20Gi"}}), tenantQuota="5Gi"),
    kv_store(
        mode="both",
        memory=MEMORY,
        s3=bucket(
            prefix="prod/eu",
            endpoint="https://s3.example:8443/kv",
            region="eu-central-1",
            storageClass="STANDARD_IA",
            capacity="2Ti",
            credentialsSecretRef={"name": "s3"},
            caConfigMapRef={"name": "ca", "key": "root.pem"},
        ),
        node={
            "port": 9000,
            "memory": {"capacity": "64Gi"},
            "tokenSecretRef": {"name": "kv-token"},
            "image": "example/kv:1",
            "nodeSelector": {"gpu": "yes"},
            "tolerations": [{"operator": "Exists"}, {"key": "gpu", "value": "a", "effect": "NoSchedule"}],
        },
    ),
    kv_store(mode="node", disk=DISK, node={"memory": MEMORY}),
    kv_store(mode="node", disk=DISK),
]
REFUSED = [
    (kv_store(), "spec", "name at least one tier"),
    (kv_store(memory={"capacity": "lots"}), "spec.memory.capacity", "does not match"),
    (kv_store(memory={"capacity": "1.5Gi"}), "spec.memory.capacity", "does not match"),
    (kv_store(memory={"capacity": 1000}), "spec.memory.capacity", "does not match"),
    (kv_store(memory=MEMORY, mode="somewhere"), "spec.mode", "embedded"),
    (kv_store(memory=MEMORY, node={}), "spec", "node belongs to mode node or both"),
    (kv_store(disk=DISK, mode="both", node={"memory": MEMORY}), "spec", "mode both keeps memory in the engines"),
    (kv_store(memory=MEMORY, encryption=KEYS), "spec", "encryption seals what goes to disk and S3"),
    (kv_store(memory=MEMORY, encoding="zstd"), "spec", "encoding is for what goes to disk and S3"),
    (kv_store(disk=DISK, encoding="gzip"), "spec.encoding", "zstd"),
    (kv_store(disk=DISK, mode="node", encoding="fp8"), "spec", "int8 and fp8 need mode embedded"),
    (kv_store(memory=MEMORY, ttl="0s"), "spec.ttl", "longer than zero"),
    (kv_store(memory=MEMORY, tenantQuota="1k"), "spec.tenantQuota", "does not match"),
    (kv_store(memory=MEMORY, mode="node", node={"port": 80}), "spec.node.port", "1024"),
    (kv_store(memory=MEMORY, mode="node", node={"port": 7461}), "spec.node", "admin port"),
    (
        kv_store(memory=MEMORY, mode="node", node={"tolerations": [{"effect": "NoSchedule"}]}),
        "spec.node.tolerations[0]",
        "needs a key",
    ),
    (
        kv_store(memory=MEMORY, mode="node", node={"tolerations": [{"operator": "Exists", "value": "x"}]}),
        "spec.node.tolerations[0]",
        "takes no value",
    ),
    (kv_store(disk={**claim(), "path": "/var/lib/kv"}), "spec.disk", "not both"),
    (kv_store(disk={**DISK, "path": "/etc/kv"}), "spec.disk.path", "does not match"),
    (kv_store(disk={**DISK, "path": "/var/lib/../kv"}), "spec.disk.path", "does not match"),
    (kv_store(disk={**DISK, "path": "/var/lib/paceline/model/kv"}), "spec.disk", "where models are mounted"),
    (kv_store(disk=claim(accessModes=["ReadWriteMany"])), "spec.disk.volumeClaimTemplate.spec.accessModes[0]", "Once"),
    (kv_store(disk=claim(dataSource={})), "spec.disk.volumeClaimTemplate.spec.dataSource", "unknown field"),
    (kv_store(s3=bucket(bucket="No_Bucket")), "spec.s3.bucket", "does not match"),
    (kv_store(s3=bucket(prefix="/prod")), "spec.s3.prefix", "does not match"),
    (kv_store(s3=bucket(endpoint="s3.example")), "spec.s3.endpoint", "does not match"),
    (kv_store(s3={}), "spec.s3.bucket", "is required"),
    (kv_store(s3=bucket(accessKey="x")), "spec.s3.accessKey", "unknown field"),
]
