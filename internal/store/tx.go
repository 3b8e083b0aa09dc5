package store

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"time"

	bolt "go.etcd.io/bbolt"

	"abfleet/internal/audit"
)

// Errors of tables. Callers match them with errors.Is.
var (
	ErrNotFound = errors.New("no such record")
	// ErrConflict means that the record changed since it was read.
	ErrConflict = errors.New("the record was changed by somebody else")
)

// Tx is one transaction. It is valid only inside the function it was given to.
type Tx struct {
	bolt    *bolt.Tx
	host    string
	epoch   uint64
	rev     uint64
	changes []Change
	events  []audit.Event
}

// Record is one stored value with what the store knows about it.
type Record[T any] struct {
	Key string
	// Rev is the revision that wrote it, 0 for a record that is not stored
	// yet. Revisions grow over the whole store.
	Rev uint64
	// Host and Epoch say which host wrote it and in which run.
	Host  string
	Epoch uint64
	Value T
}

// Table is a bucket with values of one type.
type Table[T any] struct{ Bucket Bucket }

// envelope is the stored form of a Record. The sum covers bucket, key and
// data: it finds the damage that bbolt's own structure does not show.
type envelope struct {
	Rev   uint64          `json:"rev"`
	Host  string          `json:"host"`
	Epoch uint64          `json:"epoch"`
	Sum   uint32          `json:"sum"`
	Data  json.RawMessage `json:"data"`
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func sum(bucket Bucket, key, data []byte) uint32 {
	c := crc32.Update(0, castagnoli, []byte(bucket))
	c = crc32.Update(c, castagnoli, append([]byte{0}, key...))
	return crc32.Update(c, castagnoli, append([]byte{0}, data...))
}

// open reads and verifies a stored value.
func open(bucket Bucket, key, value []byte) (envelope, error) {
	var e envelope
	if err := json.Unmarshal(value, &e); err != nil {
		return e, fmt.Errorf("record %q in %s: %w", key, bucket, err)
	}
	if e.Sum != sum(bucket, key, e.Data) {
		return e, fmt.Errorf("record %q in %s: its checksum differs", key, bucket)
	}
	return e, nil
}

func (tx *Tx) bucket(name Bucket) (*bolt.Bucket, error) {
	b := tx.bolt.Bucket([]byte(name))
	if b == nil {
		return nil, fmt.Errorf("the store has no bucket %s", name)
	}
	return b, nil
}

// revision returns the revision of this transaction.
func (tx *Tx) revision() (uint64, error) {
	if tx.rev == 0 {
		b, err := tx.bucket(bucketMeta)
		if err != nil {
			return 0, err
		}
		if tx.rev, err = b.NextSequence(); err != nil {
			return 0, err
		}
	}
	return tx.rev, nil
}

func (tx *Tx) seal(bucket Bucket, key []byte, rev uint64, value any) ([]byte, error) {
	data, err := json.Marshal(value)
	if err != nil {
		return nil, fmt.Errorf("record %q in %s: %w", key, bucket, err)
	}
	return json.Marshal(envelope{Rev: rev, Host: tx.host, Epoch: tx.epoch, Sum: sum(bucket, key, data), Data: data})
}

func (t Table[T]) decode(key, value []byte) (*Record[T], error) {
	e, err := open(t.Bucket, key, value)
	if err != nil {
		return nil, err
	}
	r := &Record[T]{Key: string(key), Rev: e.Rev, Host: e.Host, Epoch: e.Epoch}
	if err := json.Unmarshal(e.Data, &r.Value); err != nil {
		return nil, fmt.Errorf("record %q in %s: %w", key, t.Bucket, err)
	}
	return r, nil
}

// Get returns the record, or ErrNotFound.
func (t Table[T]) Get(tx *Tx, key string) (*Record[T], error) {
	b, err := tx.bucket(t.Bucket)
	if err != nil {
		return nil, err
	}
	value := b.Get([]byte(key))
	if value == nil {
		return nil, ErrNotFound
	}
	return t.decode([]byte(key), value)
}

// List returns all records in the order of their keys.
func (t Table[T]) List(tx *Tx) ([]*Record[T], error) {
	b, err := tx.bucket(t.Bucket)
	if err != nil {
		return nil, err
	}
	var list []*Record[T]
	err = b.ForEach(func(key, value []byte) error {
		r, err := t.decode(key, value)
		if err == nil {
			list = append(list, r)
		}
		return err
	})
	return list, err
}

// Put writes the record if the stored one still has revision r.Rev, 0 meaning
// that there is none, and sets the new revision in r. Else it is ErrConflict.
func (t Table[T]) Put(tx *Tx, r *Record[T]) error {
	b, err := t.swap(tx, r)
	if err != nil {
		return err
	}
	rev, err := tx.revision()
	if err != nil {
		return err
	}
	value, err := tx.seal(t.Bucket, []byte(r.Key), rev, r.Value)
	if err != nil {
		return err
	}
	if err := b.Put([]byte(r.Key), value); err != nil {
		return err
	}
	r.Rev, r.Host, r.Epoch = rev, tx.host, tx.epoch
	tx.changes = append(tx.changes, Change{Bucket: t.Bucket, Key: r.Key, Rev: rev})
	return nil
}

// Delete removes the record under the same condition as Put.
func (t Table[T]) Delete(tx *Tx, r *Record[T]) error {
	b, err := t.swap(tx, r)
	if err != nil {
		return err
	}
	rev, err := tx.revision()
	if err != nil {
		return err
	}
	if err := b.Delete([]byte(r.Key)); err != nil {
		return err
	}
	r.Rev = 0
	tx.changes = append(tx.changes, Change{Bucket: t.Bucket, Key: r.Key, Rev: rev, Deleted: true})
	return nil
}

// swap compares r's revision with the stored one.
func (t Table[T]) swap(tx *Tx, r *Record[T]) (*bolt.Bucket, error) {
	b, err := tx.bucket(t.Bucket)
	if err != nil {
		return nil, err
	}
	var stored uint64
	if value := b.Get([]byte(r.Key)); value != nil {
		e, err := open(t.Bucket, []byte(r.Key), value)
		if err != nil {
			return nil, err
		}
		stored = e.Rev
	}
	if stored != r.Rev {
		return nil, fmt.Errorf("%q in %s: %w", r.Key, t.Bucket, ErrConflict)
	}
	return b, nil
}

// Audit appends an event, gives it its id and, where it has none, its time.
// Watchers see it once the transaction is committed. The oldest events beyond
// the retention go.
func (tx *Tx) Audit(e audit.Event) error {
	b, err := tx.bucket(bucketAudit)
	if err != nil {
		return err
	}
	if e.ID, err = b.NextSequence(); err != nil {
		return err
	}
	if e.At.IsZero() {
		e.At = time.Now().UTC()
	}
	rev, err := tx.revision()
	if err != nil {
		return err
	}
	key := eventKey(e.ID)
	value, err := tx.seal(bucketAudit, key, rev, e)
	if err != nil {
		return err
	}
	if err := b.Put(key, value); err != nil {
		return err
	}
	tx.events = append(tx.events, e)
	for e.ID > maxEvents {
		first, _ := b.Cursor().First()
		if binary.BigEndian.Uint64(first) > e.ID-maxEvents {
			break
		}
		if err := b.Delete(first); err != nil {
			return err
		}
	}
	return nil
}

func eventKey(id uint64) []byte { return binary.BigEndian.AppendUint64(nil, id) }

// Events returns up to limit of the newest events with an id above after,
// oldest first.
func (tx *Tx) Events(after uint64, limit int) ([]audit.Event, error) {
	b, err := tx.bucket(bucketAudit)
	if err != nil {
		return nil, err
	}
	var list []audit.Event
	c := b.Cursor()
	for key, value := c.Last(); key != nil && len(list) < limit; key, value = c.Prev() {
		if binary.BigEndian.Uint64(key) <= after {
			break
		}
		r, err := Table[audit.Event]{bucketAudit}.decode(key, value)
		if err != nil {
			return nil, err
		}
		list = append(list, r.Value)
	}
	for i, j := 0, len(list)-1; i < j; i, j = i+1, j-1 {
		list[i], list[j] = list[j], list[i]
	}
	return list, nil
}
