"""Tiers behind the device: where blocks go that lose their place there, and how they come back.

    engine thread                                    worker thread (`kvwatch-transfer`)
    tiers.py     begins, ends, tells the scheduler     worker.py   one job after the other, in batches
    swapping.py  preempted requests                    stores.py   memory that is read and written
    prefixes.py  evicted prefix blocks                 folder.py   files of the disk tier
    tier_pool.py who holds which block of a tier       block_file.py, file_system.py

The engine thread decides, the worker moves bytes. Jobs are carried out in the order in which they were begun, so that
a block which is read by one job and then given to another is read before it is overwritten. A block of the device
stays with its owner until the engine thread has seen the end of the job (`BlockManager.hold`).

Only `device.py` knows torch.
"""
