-- Writes a heartbeat.
-- KEYS: the heartbeat, the set of all gateways or workers.
-- ARGV: id, value, ms until the heartbeat expires.
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
