"""All validators of aws-parallelcluster on a configuration file, with AWS's answers from a table.

Runs as a script in the environment of aws-parallelcluster. The table answers below botocore's clients, so that all code
above is pcluster's own. Prints one JSON list for each failure: level, validator, message. The subnet PUBLIC assigns
public addresses; the reservation is a Capacity Block if the file names one.
"""

import json
import sys
from pathlib import Path
from typing import Any

import boto3
import botocore.client
import yaml
from botocore.exceptions import ClientError
from pcluster.schemas.cluster_schema import ClusterSchema
from pcluster.validators.common import ValidatorContext

PUBLIC, ZONE = "subnet-00000000000000001", "us-west-2a"


def instance_type(name: str, vcpus: int, mib: int, network_cards: int) -> dict[str, Any]:
    """What EC2 says about an instance type."""
    cards = [{"NetworkCardIndex": index, "MaximumNetworkInterfaces": 2} for index in range(network_cards)]
    network = {"MaximumNetworkInterfaces": 2 * network_cards, "MaximumNetworkCards": network_cards}
    network |= {"DefaultNetworkCardIndex": 0, "NetworkCards": cards, "EfaSupported": network_cards > 1}
    return {
        "InstanceType": name,
        "SupportedUsageClasses": ["on-demand", "capacity-block"],
        "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
        "VCpuInfo": {"DefaultVCpus": vcpus, "DefaultCores": vcpus // 2, "DefaultThreadsPerCore": 2},
        "MemoryInfo": {"SizeInMiB": mib},
        "NetworkInfo": {**network, "EfaInfo": {"MaximumEfaInterfaces": network_cards}},
        "PlacementGroupInfo": {"SupportedStrategies": ["cluster"]},
        "InstanceStorageSupported": network_cards > 1,
    }


TYPES = [
    instance_type("c5.4xlarge", 16, 32_768, 1),
    instance_type("trn1.32xlarge", 128, 524_288, 8),
    instance_type("trn2.48xlarge", 192, 2_097_152, 16),
]
IMAGE = {
    "ImageId": "ami-1",
    "Architecture": "x86_64",
    "State": "available",
    "CreationDate": "2026-01-01T00:00:00.000Z",
    "RootDeviceName": "/dev/sda1",
    "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 40}}],
}
file = yaml.safe_load(Path(sys.argv[1]).read_text())
queue = file["Scheduling"]["SlurmQueues"][0]
RESERVATION = {
    "CapacityReservationId": "cr-0123456789abcdef0",
    "InstanceType": queue["ComputeResources"][0]["InstanceType"],
    "AvailabilityZone": ZONE,
    "ReservationType": "capacity-block" if queue["CapacityType"] == "CAPACITY_BLOCK" else "default",
    "State": "active",
    "TotalInstanceCount": 64,
    "AvailableInstanceCount": 64,
    "InstancePlatform": "Linux/UNIX",
}


def subnet(name: str) -> dict[str, Any]:
    public = {"MapPublicIpOnLaunch": name == PUBLIC}
    return {"SubnetId": name, "VpcId": "vpc-1", "AvailabilityZone": ZONE, "AvailableIpAddressCount": 4000, **public}


def answer(client: object, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Stand in for AWS."""
    asked = arguments.get("InstanceTypes") or [entry["InstanceType"] for entry in TYPES]
    offers = [{"InstanceType": entry["InstanceType"], "Location": ZONE} for entry in TYPES]
    answers: dict[str, dict[str, Any]] = {
        "DescribeInstanceTypes": {"InstanceTypes": [entry for entry in TYPES if entry["InstanceType"] in asked]},
        "DescribeInstanceTypeOfferings": {"InstanceTypeOfferings": offers},
        "DescribeSubnets": {"Subnets": [subnet(name) for name in arguments.get("SubnetIds", [PUBLIC])]},
        "DescribeImages": {"Images": [IMAGE]},
        "DescribeKeyPairs": {"KeyPairs": [{"KeyName": "me", "KeyType": "ed25519"}]},
        "DescribeVpcs": {"Vpcs": [{"VpcId": "vpc-1", "CidrBlock": "10.0.0.0/16"}]},
        "DescribeVpcAttribute": {"EnableDnsSupport": {"Value": True}, "EnableDnsHostnames": {"Value": True}},
        "DescribeRouteTables": {"RouteTables": [{"Routes": [{"GatewayId": "igw-1"}]}]},
        "DescribeCapacityReservations": {"CapacityReservations": [RESERVATION]},
        "HeadObject": {"ContentLength": 1},
        "HeadBucket": {},
        "GetBucketLocation": {"LocationConstraint": "us-west-2"},
    }
    if operation in answers:
        return {"ResponseMetadata": {}, **answers[operation]}
    code = "DryRunOperation" if operation == "RunInstances" else "NotInTheTable"
    raise ClientError({"Error": {"Code": code, "Message": operation}}, operation)


if __name__ == "__main__":
    boto3.setup_default_session(aws_access_key_id="x", aws_secret_access_key="x", region_name="us-west-2")
    botocore.client.BaseClient._make_api_call = answer
    for failure in ClusterSchema(cluster_name="trainyard").load(file).validate(context=ValidatorContext()):
        print(json.dumps([failure.level.name, failure.validator_type, failure.message]))
