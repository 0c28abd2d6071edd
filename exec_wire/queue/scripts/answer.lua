-- Acknowledges jobs, publishes their answers and stores results for idempotency keys.
-- KEYS: job streams, reply streams, records.
-- ARGV: group, seconds until a record expires, number of job streams, number of reply streams, wire version;
-- then for each job stream: number of ids, ids; for each reply stream: job ids, packed answers; for each record: its value.
-- Returns for each reply stream 1 if it exists, else 0.
local jobs, replies, at, delivered = tonumber(ARGV[3]), tonumber(ARGV[4]), 6, {}
for number = 1, jobs do
  local last = at + tonumber(ARGV[at])
  redis.call('XACK', KEYS[number], ARGV[1], unpack(ARGV, at + 1, last))
  redis.call('XDEL', KEYS[number], unpack(ARGV, at + 1, last))
  at = last + 1
end
for number = jobs + 1, jobs + replies do
  delivered[#delivered + 1] = redis.call('XADD', KEYS[number], 'NOMKSTREAM', '*',
    'v', ARGV[5], 'id', ARGV[at], 'a', ARGV[at + 1]) and 1 or 0
  at = at + 2
end
for number = jobs + replies + 1, #KEYS do
  redis.call('SET', KEYS[number], ARGV[at], 'EX', ARGV[2])
  at = at + 1
end
return delivered
